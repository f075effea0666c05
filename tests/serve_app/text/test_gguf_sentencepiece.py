from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece

from engine.errors import TokenizerError
from serve_app.text.tokenizer import load_tokenizer
from tests.serve_app.text.makers import AWKWARD


def piece_type(library: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    checks = {2: library.is_unknown, 3: library.is_control, 6: library.is_byte}
    by_check = [number for number, is_kind in checks.items() if is_kind(token_id)]
    user_defined = library.id_to_piece(token_id) in ("\n", "<|separator|>")
    return by_check[0] if by_check else 4 if user_defined else 1


def convert(source: Path, path: Path, **values: Any) -> Path:
    """The SentencePiece model as a GGUF file holds it; `values` add to its metadata or replace it."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(source))
    ids = range(library.vocab_size())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", "llama")
    arrays = {
        "tokens": [library.id_to_piece(i) for i in ids],
        "scores": [library.get_score(i) for i in ids],
        "token_type": [piece_type(library, i) for i in ids],
    }
    for name, array in {**arrays, **values}.items():
        if isinstance(array, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", array)
        else:
            writer.add_array(f"tokenizer.ggml.{name}", array)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_the_tokens_are_those_of_the_model_file(tmp_path: Path, sentencepiece_path: Path) -> None:
    tokenizer = load_tokenizer(convert(sentencepiece_path, tmp_path / "a.gguf"))
    original = load_tokenizer(sentencepiece_path)
    for text in [*AWKWARD, "the quick fox<|separator|></s>café"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == original.decode(ids)
    assert tokenizer.special_token_ids == original.special_token_ids
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(("values", "before"), [({}, [1]), ({"add_bos_token": False}, [])])
def test_bos_is_added_unless_the_file_says_no(
    tmp_path: Path, sentencepiece_path: Path, values: dict[str, bool], before: list[int]
) -> None:
    tokenizer = load_tokenizer(convert(sentencepiece_path, tmp_path / "a.gguf", **values))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=True) == [*before, *plain]


def test_the_space_before_a_text_is_the_files_choice(tmp_path: Path, sentencepiece_path: Path) -> None:
    with_space = load_tokenizer(convert(sentencepiece_path, tmp_path / "a.gguf"))
    without = load_tokenizer(convert(sentencepiece_path, tmp_path / "b.gguf", add_space_prefix=False))
    assert with_space.token_text(with_space.encode("the", add_special_tokens=False)[0]).startswith(" ")
    assert without.token_text(without.encode("the", add_special_tokens=False)[0]).startswith("t")
    assert not without.strips_leading_space


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scores": [0.5]}, "scores"),
        ({"tokens": ["a", "a"], "scores": [0.0, 0.0], "token_type": [2, 1]}, "make no SentencePiece model"),
        ({"tokens": ["a", "b", "c"], "scores": [0.0] * 3, "token_type": [1, 1, 1]}, "make no SentencePiece model"),
    ],
)
def test_metadata_that_makes_no_model_is_refused(
    tmp_path: Path, sentencepiece_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(convert(sentencepiece_path, tmp_path / "a.gguf", **values))
