"""How a vocabulary's spelling of a token maps to the bytes that the token stands for."""

import re

from engine.errors import TokenizerError

SPACE_MARK = "\u2581"
"""SentencePiece writes a space as this."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters (Radford et al., 2019; `bytes_to_unicode` of its encoder).

    Printable Latin-1 bytes are spelled as themselves, the others, in order, as U+0100, U+0101, ...
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level BPE token. One with a character outside the byte alphabet is taken as it is written."""
    try:
        return bytes([_BYTE_OF_CHAR[c] for c in piece])
    except KeyError:
        return piece.encode("utf-8")


def space_mark_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece-style token: marks become spaces."""
    return piece.replace(SPACE_MARK, " ").encode("utf-8")


def byte_piece(piece: str) -> bytes | None:
    """The byte that `<0xE6>` names; None for any other piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match[1]) if match else None


def space_mark_or_byte(piece: str) -> bytes:
    """Bytes of a token in a vocabulary with byte fallback."""
    byte = byte_piece(piece)
    return space_mark_bytes(piece) if byte is None else byte


def check_token_id(name: str, token_id: int | None, vocab_size: int) -> int | None:
    """`token_id` itself. Raises `TokenizerError` where the vocabulary has no such token."""
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise TokenizerError(f"{name} is {token_id}, outside of the vocabulary of {vocab_size} tokens")
    return token_id
