"""What holds for every tokenizer, and how one is found."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequestError, TokenizerError
from serve_app.text.pieces import SPACE_MARK
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.serve_app.text.makers import AWKWARD


@pytest.mark.parametrize("text", AWKWARD)
def test_no_text_is_lost(any_tokenizer: Tokenizer, text: str) -> None:
    assert any_tokenizer.decode(any_tokenizer.encode(text, add_special_tokens=False)) == text


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters=SPACE_MARK)))
def test_no_text_is_lost_whatever_it_is(any_tokenizer: Tokenizer, text: str) -> None:
    # U+2581 itself is the one character that SentencePiece cannot tell from a space.
    ids = any_tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert any_tokenizer.decode(ids) == text


def test_token_bytes_join_to_the_decoded_text(any_tokenizer: Tokenizer) -> None:
    text = " the café 🙂"
    ids = any_tokenizer.encode(text, add_special_tokens=False)
    prefix = " " if any_tokenizer.strips_leading_space else ""
    assert b"".join(map(any_tokenizer.token_bytes, ids)).decode() == prefix + text


def test_half_a_surrogate_pair_is_refused_with_its_position(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D83D.* at character 3"):
        any_tokenizer.encode("abc\ud83d", add_special_tokens=True)


def test_ids_that_only_pad_the_embedding_have_no_text(any_tokenizer: Tokenizer) -> None:
    assert any_tokenizer.decode([any_tokenizer.vocab_size, any_tokenizer.vocab_size + 7]) == ""


def test_every_id_of_the_vocabulary_has_bytes(any_tokenizer: Tokenizer) -> None:
    assert all(any_tokenizer.token_bytes(i) for i in range(any_tokenizer.vocab_size))


def test_a_negative_id_is_refused(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="-1 is no token id"):
        any_tokenizer.decode([-1])


def test_special_tokens_are_skipped_or_kept(any_tokenizer: Tokenizer) -> None:
    special = min(any_tokenizer.special_token_ids)
    ids = [special, *any_tokenizer.encode("the", add_special_tokens=False)]
    assert any_tokenizer.decode(ids) == "the"
    assert any_tokenizer.decode(ids, skip_special_tokens=False).startswith(any_tokenizer.token_text(special))


def test_part_of_a_character_is_shown_as_a_replacement_character(any_tokenizer: Tokenizer) -> None:
    first = next(i for i in range(any_tokenizer.vocab_size) if any_tokenizer.token_bytes(i) == b"\xe6")
    assert any_tokenizer.token_text(first) == "\ufffd"


def test_a_directory_with_both_kinds_gives_tokenizer_json(
    tmp_path: Path, byte_level_path: Path, sentencepiece_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_path.read_bytes())
    assert load_tokenizer(tmp_path).vocab_size == load_tokenizer(sentencepiece_path).vocab_size
    (tmp_path / "tokenizer.json").write_bytes(byte_level_path.read_bytes())
    assert load_tokenizer(tmp_path).vocab_size == load_tokenizer(byte_level_path).vocab_size


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.gguf", None, "does not exist"),
        ("tokenizer.bin", b"x", "no known kind"),
        ("a.gguf", b"", "cannot be read as a GGUF file"),
        ("a.gguf", b"PK\x03\x04 and more bytes than a header", "GGUF"),
        ("a.model", b"not a model", "SentencePiece"),
        ("a.model", b"", "SentencePiece"),
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json"),
    ],
)
def test_a_bad_file_is_named_in_the_error(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as raised:
        load_tokenizer(path)
    assert str(path) in str(raised.value)


def test_a_directory_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"neither a tokenizer\.json nor a tokenizer\.model"):
        load_tokenizer(tmp_path)
