import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from engine.errors import TokenizerError
from serve_app.text.hf_tokenizer import load_hf_tokenizer
from serve_app.text.tokenizer import Tokenizer
from tests.serve_app.text.makers import llama_tokenizer


def directory(tmp_path: Path, backend: tokenizers.Tokenizer | None = None, **files: dict[str, Any]) -> Path:
    """Writes `backend` (llama's kind) and `files` (name without .json: content); returns the tokenizer's path."""
    path = tmp_path / "tokenizer.json"
    (backend or llama_tokenizer()).save(str(path))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_byte_level_ids_are_the_packages(byte_level_path: Path) -> None:
    text = "Hello café <|im_start|>\n\n x<tool>"
    tokenizer, package = load_hf_tokenizer(byte_level_path), tokenizers.Tokenizer.from_file(str(byte_level_path))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == package.encode(text, add_special_tokens=False).ids
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.decode(ids) == package.decode(ids) == "Hello café \n\n x<tool>"


def test_llama_tokens_by_hand(llama_path: Path) -> None:
    tokenizer = load_hf_tokenizer(llama_path)
    ids = tokenizer.encode("the th\né", add_special_tokens=True)
    assert ids == [1, 289, 259, 287, 3 + 0x0A, 3 + 0xC3, 3 + 0xA9]
    assert [tokenizer.token_bytes(i) for i in ids] == [b"<s>", b" the", b" ", b"th", b"\n", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "the th\né"
    assert tokenizer.strips_leading_space


@pytest.fixture(scope="module")
def pair(byte_level_path: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return load_hf_tokenizer(byte_level_path), tokenizers.Tokenizer.from_file(str(byte_level_path))


@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_decodes_as_the_package(
    pair: tuple[Tokenizer, tokenizers.Tokenizer], data: st.DataObject, skip: bool
) -> None:
    tokenizer, package = pair
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=20))
    assert tokenizer.decode(ids, skip_special_tokens=skip) == package.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(text=st.text(alphabet="the é日🙂\n", max_size=20))
def test_llama_decodes_valid_text_as_the_package(llama_path: Path, text: str) -> None:
    tokenizer, package = load_hf_tokenizer(llama_path), tokenizers.Tokenizer.from_file(str(llama_path))
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == package.encode(text).ids
    assert tokenizer.decode(ids) == package.decode(ids)


def test_special_tokens_are_text_where_asked_and_never_by_what_came_before(llama_path: Path) -> None:
    tokenizer = load_hf_tokenizer(llama_path)
    for _ in range(2):
        assert 2 in tokenizer.encode("a</s>", add_special_tokens=False)
        assert 2 not in tokenizer.encode("a</s>", add_special_tokens=False, parse_special=False)


def test_truncation_and_padding_left_by_training_are_off(tmp_path: Path) -> None:
    backend = llama_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=50, pad_id=0)
    tokenizer = load_hf_tokenizer(directory(tmp_path, backend))
    assert len(tokenizer.encode("abcdef", add_special_tokens=False)) == 7


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": True, "bos_token": "<s>"}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}, [1], [2]),
    ],
)
def test_the_config_or_else_the_post_processor_decides_about_bos(
    tmp_path: Path, config: dict[str, Any], before: list[int], after: list[int]
) -> None:
    tokenizer = load_hf_tokenizer(directory(tmp_path, tokenizer_config=config))
    assert tokenizer.encode("the", add_special_tokens=True) == [*before, 289, *after]
    assert tokenizer.encode("the", add_special_tokens=False) == [289]


def test_eos_tokens_are_the_tokenizers_and_the_generation_configs(tmp_path: Path) -> None:
    path = directory(
        tmp_path, tokenizer_config={"eos_token": "</s>"}, generation_config={"eos_token_id": [0, 2]}, config={}
    )
    tokenizer = load_hf_tokenizer(path)
    assert (tokenizer.eos_token_ids, tokenizer.eos_token) == ((2, 0), "</s>")
    assert (tokenizer.bos_token_id, tokenizer.bos_token) == (None, "")


@pytest.mark.parametrize("add_prefix", ["always", "never"])
def test_metaspace_tokenizers_are_read(tmp_path: Path, add_prefix: str) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"\u2581": 0, "a": 1, "\u2581a": 2}, merges=[("\u2581", "a")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=add_prefix)
    backend.decoder = decoders.Metaspace(prepend_scheme=add_prefix)
    tokenizer = load_hf_tokenizer(directory(tmp_path, backend))
    ids = tokenizer.encode("a a", add_special_tokens=False)
    assert ids == ([2, 2] if add_prefix == "always" else [1, 2])
    assert tokenizer.decode(ids) == "a a"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Strip("x", 1, 0)])
def test_a_decoder_without_fixed_bytes_is_refused(tmp_path: Path, decoder: decoders.Decoder | None) -> None:
    backend = llama_tokenizer()
    backend.decoder = decoder
    with pytest.raises(TokenizerError, match="has the decoder"):
        load_hf_tokenizer(directory(tmp_path, backend))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"eos_token": "<end>"}}, "eos_token is '<end>', which is no token"),
        ({"tokenizer_config": {"bos_token": "<begin>"}}, "bos_token is '<begin>', which is no token"),
        ({"generation_config": {"eos_token_id": 999}}, "eos_token_id is 999, outside of the vocabulary of 290"),
        ({"tokenizer_config": {"add_bos_token": True}}, "asks for a BOS token"),
        ({"tokenizer_config": {"add_eos_token": True}}, "asks for an EOS token"),
    ],
)
def test_files_that_contradict_each_other_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_hf_tokenizer(directory(tmp_path, **files))
