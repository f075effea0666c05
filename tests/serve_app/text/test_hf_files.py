import json
from pathlib import Path

import pytest

from engine.errors import TokenizerError
from serve_app.text.hf_files import HfTokenizerFiles, read_hf_files


def read(tmp_path: Path, **files: object) -> HfTokenizerFiles:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return read_hf_files(tmp_path)


def test_no_files_say_nothing(tmp_path: Path) -> None:
    assert read(tmp_path) == HfTokenizerFiles(None, None, None, (), None, None, {})


@pytest.mark.parametrize(
    "spelling", ["<e>", {"content": "<e>", "lstrip": False}, {"__type": "AddedToken", "content": "<e>"}]
)
def test_tokens_are_read_in_every_spelling(tmp_path: Path, spelling: object) -> None:
    assert read(tmp_path, tokenizer_config={"eos_token": spelling}).eos_token == "<e>"


def test_the_config_comes_before_the_special_tokens_map(tmp_path: Path) -> None:
    files = read(
        tmp_path,
        tokenizer_config={"bos_token": None, "eos_token": "<new>"},
        special_tokens_map={"bos_token": {"content": "<b>"}, "eos_token": "<old>"},
    )
    assert (files.bos_token, files.eos_token) == ("<b>", "<new>")


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 8], (7, 8)), (None, ())])
def test_eos_ids_are_one_or_several(tmp_path: Path, value: object, ids: tuple[int, ...]) -> None:
    assert read(tmp_path, config={"eos_token_id": value}).eos_token_ids == ids


def test_the_generation_config_comes_before_the_models(tmp_path: Path) -> None:
    assert read(tmp_path, config={"eos_token_id": 1}, generation_config={"eos_token_id": 2}).eos_token_ids == (2,)


def test_a_template_file_comes_before_the_config(tmp_path: Path) -> None:
    assert read(tmp_path, tokenizer_config={"chat_template": "old"}).chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new é", encoding="utf-8")
    assert read_hf_files(tmp_path).chat_template == "new é"


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert read(tmp_path, tokenizer_config={"chat_template": templates}).chat_template == "d"
    with pytest.raises(TokenizerError, match=r"lists .'tool_use'.; expected one named 'default'"):
        read(tmp_path, tokenizer_config={"chat_template": templates[:1]})


def test_added_tokens_are_read_in_both_spellings(tmp_path: Path) -> None:
    files = read(
        tmp_path, tokenizer_config={"added_tokens_decoder": {"5": {"content": "<a>"}}}, added_tokens={"<b>": 6}
    )
    assert files.added_tokens == {5: "<a>", 6: "<b>"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config", [], "holds a list; expected an object"),
        ("tokenizer_config", {"eos_token": 3}, "eos_token is 3; expected a string"),
        ("tokenizer_config", {"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
        ("tokenizer_config", {"chat_template": 3}, "chat_template is a int"),
        ("tokenizer_config", {"added_tokens_decoder": []}, None),
        ("tokenizer_config", {"added_tokens_decoder": [1]}, "added_tokens_decoder is a list"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": "<a>"}}, r"added_tokens_decoder\['x'\]"),
        ("added_tokens", {"<a>": "5"}, "'<a>' has the id '5'"),
        ("generation_config", {"eos_token_id": "2"}, "eos_token_id is '2'"),
        ("generation_config", {"eos_token_id": [True]}, "eos_token_id is .True."),
    ],
)
def test_a_malformed_entry_is_named(tmp_path: Path, name: str, content: object, message: str | None) -> None:
    if message is None:
        assert read(tmp_path, **{name: content}).added_tokens == {}
        return
    with pytest.raises(TokenizerError, match=message) as raised:
        read(tmp_path, **{name: content})
    assert f"{name}.json" in str(raised.value)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json cannot be read as JSON"):
        read_hf_files(tmp_path)
