import pytest
from tokenizers import pre_tokenizers

from engine.errors import TokenizerError
from serve_app.text.pieces import byte_level_bytes, byte_piece, check_token_id, space_mark_or_byte


def test_the_byte_alphabet_is_that_of_gpt2() -> None:
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in (chr(c) for c in range(0x800)):
        ((piece, _),) = spelled.pre_tokenize_str(text)
        assert byte_level_bytes(piece) == text.encode()


def test_every_byte_has_a_spelling() -> None:
    assert sorted(byte_level_bytes(c)[0] for c in pre_tokenizers.ByteLevel.alphabet()) == list(range(256))


@pytest.mark.parametrize(
    ("piece", "data"),
    [
        ("<0xE6>", b"\xe6"),
        ("\u2581a\u2581", b" a "),
        ("<0xE6> ", b"<0xE6> "),
        ("<0xG0>", b"<0xG0>"),
        ("日", "日".encode()),
    ],
)
def test_space_marks_and_byte_pieces(piece: str, data: bytes) -> None:
    assert space_mark_or_byte(piece) == data


def test_only_a_whole_byte_piece_is_one() -> None:
    assert byte_piece("x<0xE6>") is None


@pytest.mark.parametrize("token_id", [-1, 7])
def test_an_id_outside_of_the_vocabulary_is_named(token_id: int) -> None:
    with pytest.raises(TokenizerError, match=f"eos is {token_id}, outside of the vocabulary of 7"):
        check_token_id("eos", token_id, 7)
