"""Hugging Face's tokenizer.json, with the files beside it."""

import json
from collections.abc import Callable
from pathlib import Path

import tokenizers

from engine.errors import TokenizerError
from serve_app.text.base import Tokenizer, TokenizerInfo
from serve_app.text.fast_tokenizer import FastTokenizer
from serve_app.text.hf_files import HfTokenizerFiles, read_hf_files
from serve_app.text.pieces import SPACE_MARK, byte_level_bytes, check_token_id, space_mark_bytes, space_mark_or_byte

PieceBytes = Callable[[str], bytes]


def load_hf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the tokenizer.json at `path` and the files beside it.

    An `add_bos_token` or `add_eos_token` in tokenizer_config.json decides what `add_special_tokens` adds; where it
    names neither, the post-processor of tokenizer.json does. Raises `TokenizerError` for files that are missing,
    malformed, or of a kind whose tokens have no fixed bytes.
    """
    try:
        source = path.read_text(encoding="utf-8")
        backend = tokenizers.Tokenizer.from_str(source)
    except Exception as e:  # the package raises bare Exception for whatever it cannot parse
        raise TokenizerError(f"{path} cannot be read as a tokenizer.json: {e}") from e
    # What training left there must not cut or pad prompts.
    backend.no_truncation()
    backend.no_padding()
    to_bytes, strips_leading_space = _piece_decoder(path, json.loads(source).get("decoder"))
    added = backend.get_added_tokens_decoder()
    files = read_hf_files(path.parent)
    # Where ids have gaps, the number of tokens is less than the largest id.
    vocab_size = max([backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
    info = TokenizerInfo(
        vocab_size=vocab_size,
        bos_token_id=_id_of(path, backend, "bos_token", files.bos_token),
        eos_token_ids=_eos_token_ids(path, backend, files, vocab_size),
        special_token_ids=frozenset(i for i, token in added.items() if token.special),
        chat_template=files.chat_template,
        strips_leading_space=strips_leading_space,
    )

    def piece_bytes(token_id: int) -> bytes:
        if token_id in added:
            return added[token_id].content.encode("utf-8")
        piece = backend.id_to_token(token_id)
        return b"" if piece is None else to_bytes(piece)

    around = None
    if files.add_bos_token is not None or files.add_eos_token is not None:
        around = info.around(path.parent, add_bos=bool(files.add_bos_token), add_eos=bool(files.add_eos_token))
    return FastTokenizer(backend, info, piece_bytes, around)


def _eos_token_ids(
    path: Path, backend: tokenizers.Tokenizer, files: HfTokenizerFiles, vocab_size: int
) -> tuple[int, ...]:
    own = _id_of(path, backend, "eos_token", files.eos_token)
    for token_id in files.eos_token_ids:
        check_token_id(f"{path.parent}: eos_token_id", token_id, vocab_size)
    return tuple(dict.fromkeys([*([] if own is None else [own]), *files.eos_token_ids]))


def _id_of(path: Path, backend: tokenizers.Tokenizer, name: str, token: str | None) -> int | None:
    token_id = None if token is None else backend.token_to_id(token)
    if token is not None and token_id is None:
        raise TokenizerError(f"{path.parent}: {name} is {token!r}, which is no token of {path.name}")
    return token_id


def _piece_decoder(path: Path, decoder: object) -> tuple[PieceBytes, bool]:
    """How a token's spelling becomes bytes, and whether decoding takes a leading space off, by the file's `decoder`."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == SPACE_MARK:
        # Older files say add_prefix_space, newer ones prepend_scheme.
        scheme = steps[0].get("prepend_scheme", "always" if steps[0].get("add_prefix_space", True) else "never")
        return space_mark_bytes, scheme != "never"
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_space_mark(steps[0]):
        if kinds[3:] == ["Strip"] and (steps[3].get("content"), steps[3].get("start"), steps[3].get("stop")) == (
            " ",
            1,
            0,
        ):
            return space_mark_or_byte, True
        if not kinds[3:]:
            return space_mark_or_byte, False
    raise TokenizerError(
        f"{path} has the decoder {json.dumps(decoder)[:300]}; known are ByteLevel, Metaspace, and "
        "Replace + ByteFallback + Fuse with or without Strip"
    )


def _steps(decoder: object) -> list[dict[str, object]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for step in decoder.get("decoders", []) if isinstance(step, dict)]
    return [decoder]


def _is_space_mark(replace: dict[str, object]) -> bool:
    return replace.get("pattern") == {"String": SPACE_MARK} and replace.get("content") == " "
