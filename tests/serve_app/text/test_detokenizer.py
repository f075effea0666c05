from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.detokenizer import IncrementalDetokenizer
from serve_app.text.tokenizer import Tokenizer, load_tokenizer


def chunked(ids: list[int], data: st.DataObject) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 1)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@settings(deadline=None, max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_any_chunking_gives_the_text_of_decode(any_tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size + 2), max_size=40))
    detokenizer = IncrementalDetokenizer(any_tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(chunk) for chunk in chunked(ids, data)) + detokenizer.finish()
    assert text == any_tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(text=st.text(alphabet="ab é日🙂👩\u200d\u0301", max_size=20))
def test_valid_text_never_shows_a_replacement_character(any_tokenizer: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(any_tokenizer)
    seen = ""
    for token_id in any_tokenizer.encode(text, add_special_tokens=False):
        seen += detokenizer.push([token_id])
        assert text.startswith(seen)
    assert seen == text
    assert detokenizer.finish() == ""


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([b])] for b in data]


def test_a_character_comes_with_its_last_byte(any_tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(any_tokenizer)
    pushes = [detokenizer.push([i]) for i in byte_ids(any_tokenizer, "a日🙂".encode())]
    assert pushes == ["a", "", "", "日", "", "", "", "🙂"]


def test_bytes_that_nothing_can_complete_are_replaced_at_once(any_tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(any_tokenizer)
    pushes = [detokenizer.push([i]) for i in byte_ids(any_tokenizer, b"\xe6\x97a\xff")]
    assert pushes == ["", "", "\ufffda", "\ufffd"]


def test_finish_shows_a_broken_end(any_tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(any_tokenizer)
    assert detokenizer.push(byte_ids(any_tokenizer, b"a\xe6\x97")) == "a"
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize(("continues_text", "expected"), [(False, "the the"), (True, " the the")])
def test_the_dummy_prefix_is_text_where_the_tokens_continue_one(
    llama_path: Path, continues_text: bool, expected: str
) -> None:
    tokenizer = load_tokenizer(llama_path)
    ids = tokenizer.encode("the the", add_special_tokens=True)
    detokenizer = IncrementalDetokenizer(tokenizer, continues_text=continues_text)
    assert "".join(detokenizer.push([i]) for i in ids) == expected


def test_each_token_is_looked_at_once(byte_level_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level_path)
    seen: list[int] = []

    class Spy:
        strips_leading_space = False

        def output_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
            seen.append(token_id)
            return tokenizer.output_bytes(token_id, skip_special_tokens)

    ids = tokenizer.encode("a long text " * 20, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(Spy())  # type: ignore[arg-type]
    for token_id in ids:
        detokenizer.push([token_id])
    assert seen == ids
