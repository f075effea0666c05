"""The small JSON files beside a Hugging Face tokenizer: special tokens and chat template, in old and new spellings."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.errors import TokenizerError


@dataclass(frozen=True)
class HfTokenizerFiles:
    """What the files say; None where they say nothing."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    """From generation_config.json, or else config.json."""
    add_bos_token: bool | None
    add_eos_token: bool | None
    added_tokens: Mapping[int, str]
    """`added_tokens_decoder` of tokenizer_config.json, and added_tokens.json."""


def read_hf_files(directory: Path) -> HfTokenizerFiles:
    """Reads those of the files that are there. Raises `TokenizerError` naming the file and entry that are malformed."""
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path)
    special_path = directory / "special_tokens_map.json"
    special = read_json(special_path)
    generation_path = directory / "generation_config.json"
    if not generation_path.exists():
        generation_path = directory / "config.json"
    generation = read_json(generation_path)

    def token(name: str) -> str | None:
        text = _token_text(config_path, name, config.get(name))
        return _token_text(special_path, name, special.get(name)) if text is None else text

    return HfTokenizerFiles(
        chat_template=_chat_template(directory, config_path, config.get("chat_template")),
        bos_token=token("bos_token"),
        eos_token=token("eos_token"),
        eos_token_ids=_token_ids(generation_path, "eos_token_id", generation.get("eos_token_id")),
        add_bos_token=_flag(config_path, "add_bos_token", config.get("add_bos_token")),
        add_eos_token=_flag(config_path, "add_eos_token", config.get("add_eos_token")),
        added_tokens=_added_tokens(config_path, config, directory / "added_tokens.json"),
    )


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file; empty where there is no such file. Raises `TokenizerError` where it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise TokenizerError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def _token_text(path: Path, name: str, value: object) -> str | None:
    """A token's text: plain, or (an `AddedToken` written out) under "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value or None
    raise TokenizerError(f"{path}: {name} is {value!r}; expected a string or an object with a string 'content'")


def _token_ids(path: Path, name: str, value: object) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    for i in values:
        if not isinstance(i, int) or isinstance(i, bool):
            raise TokenizerError(f"{path}: {name} is {value!r}; expected an integer or a list of them")
    return tuple(values)


def _flag(path: Path, name: str, value: object) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise TokenizerError(f"{path}: {name} is {value!r}; expected true, false or null")


def _chat_template(directory: Path, config_path: Path, value: object) -> str | None:
    """chat_template.jinja, else `chat_template` of the config: a string, or the one named "default" of a list."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            raise TokenizerError(f"{path} cannot be read: {e}") from e
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        if "default" not in named:
            raise TokenizerError(
                f"{config_path}: chat_template lists {sorted(map(str, named))}; expected one named 'default' among them"
            )
        value = named["default"]
    if value is None or isinstance(value, str):
        return value
    raise TokenizerError(f"{config_path}: chat_template is a {type(value).__name__}; expected a string or a list")


def _added_tokens(config_path: Path, config: Mapping[str, object], added_path: Path) -> dict[int, str]:
    tokens: dict[int, str] = {}
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{config_path}: added_tokens_decoder is a {type(decoder).__name__}; expected an object")
    for key, value in decoder.items():
        text = _token_text(config_path, f"added_tokens_decoder[{key!r}]", value)
        if not key.isdecimal() or text is None:
            raise TokenizerError(
                f"{config_path}: added_tokens_decoder[{key!r}] is {value!r}; expected a token by its id"
            )
        tokens[int(key)] = text
    for text, token_id in read_json(added_path).items():
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise TokenizerError(f"{added_path}: {text!r} has the id {token_id!r}; expected an integer")
        tokens[token_id] = text
    return tokens
