"""SentencePiece models (Grok-1, llama 2, mistral)."""

import re
from pathlib import Path

import sentencepiece

from engine.errors import TokenizerError
from serve_app.text.base import IdsAround, Tokenizer, TokenizerInfo
from serve_app.text.hf_files import HfTokenizerFiles, read_hf_files
from serve_app.text.pieces import SPACE_MARK, byte_piece, check_token_id, space_mark_bytes


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece processor.

    The library itself never reads a control piece from text; `parse_special` does, by encoding the text between them.
    User-defined pieces (Grok-1's "<|separator|>") are read by the library with or without `parse_special`, and are not
    special: `decode` keeps them.
    """

    def __init__(
        self,
        processor: sentencepiece.SentencePieceProcessor,
        info: TokenizerInfo,
        around: IdsAround,
    ) -> None:
        """`around`: ids that `add_special_tokens` puts before and after a text."""
        super().__init__(info)
        self._processor = processor
        self._around = around
        self._controls = {processor.id_to_piece(i): i for i in info.special_token_ids if processor.is_control(i)}
        names = sorted(self._controls, key=len, reverse=True)
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def _encode(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        before, after = self._around if add_special_tokens else ((), ())
        return [*before, *self._encode_text(text, parse_special), *after]

    def _encode_text(self, text: str, parse_special: bool) -> list[int]:
        if not parse_special or self._control_pattern is None:
            return self._processor.encode(text)
        ids: list[int] = []
        for part in self._control_pattern.split(text):
            control = self._controls.get(part)
            ids += self._processor.encode(part) if control is None else [control]
        return ids

    def _piece_bytes(self, token_id: int) -> bytes:
        piece = self._processor.id_to_piece(token_id)
        if self._processor.is_byte(token_id):
            return byte_piece(piece) or b""
        if token_id in self.special_token_ids:
            return piece.encode("utf-8")
        return space_mark_bytes(piece)


def load_sentencepiece_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a SentencePiece model file.

    With a tokenizer_config.json beside it, that file decides about BOS and EOS (its default: BOS before every text).
    Without one nothing is added, as by the library itself and the Grok-1 release. Raises `TokenizerError` for a file
    that is missing or foreign, and for tokens that were added outside of the model.
    """
    if not path.is_file():
        raise TokenizerError(f"{path} is no file; expected a SentencePiece model")
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as e:
        raise TokenizerError(f"{path} cannot be read as a SentencePiece model: {e}") from e
    files = read_hf_files(path.parent)
    _refuse_added_tokens(path, processor, files)
    info = _info(processor, files.chat_template, path, files)
    has_config = (path.parent / "tokenizer_config.json").exists()
    add_bos = has_config if files.add_bos_token is None else files.add_bos_token
    around = info.around(path.parent, add_bos=add_bos, add_eos=bool(files.add_eos_token))
    return SentencePieceTokenizer(processor, info, around)


def _info(
    processor: sentencepiece.SentencePieceProcessor, chat_template: str | None, path: Path, files: HfTokenizerFiles
) -> TokenizerInfo:
    """Special tokens of a processor; those that `files` name come before its own."""
    vocab_size = processor.vocab_size()

    def id_of(name: str, token: str | None, own: int) -> int | None:
        if token is None:
            return own if own >= 0 else None
        token_id = processor.piece_to_id(token)
        if processor.id_to_piece(token_id) != token:
            raise TokenizerError(f"{path.parent}: {name} is {token!r}, which is no token of {path.name}")
        return token_id

    eos = id_of("eos_token", files.eos_token, processor.eos_id())
    for i in files.eos_token_ids:
        check_token_id(f"{path.parent}: eos_token_id", i, vocab_size)
    return TokenizerInfo(
        vocab_size=vocab_size,
        bos_token_id=id_of("bos_token", files.bos_token, processor.bos_id()),
        eos_token_ids=tuple(dict.fromkeys([*([] if eos is None else [eos]), *files.eos_token_ids])),
        special_token_ids=frozenset(i for i in range(vocab_size) if processor.is_control(i) or processor.is_unknown(i)),
        chat_template=chat_template,
        strips_leading_space=has_dummy_prefix(processor),
    )


def has_dummy_prefix(processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether the model puts a space before every text: the library does not say, but any word shows it."""
    return "".join(processor.encode("a", out_type=str)).startswith(SPACE_MARK)


def _refuse_added_tokens(path: Path, processor: sentencepiece.SentencePieceProcessor, files: HfTokenizerFiles) -> None:
    vocab_size = processor.vocab_size()
    foreign = {i: t for i, t in files.added_tokens.items() if i >= vocab_size or processor.id_to_piece(i) != t}
    if foreign:
        raise TokenizerError(
            f"{path.parent} adds tokens that {path.name} does not hold ({len(foreign)}, such as "
            f"{next(iter(foreign.items()))}); convert it to a tokenizer.json, which can hold them"
        )
