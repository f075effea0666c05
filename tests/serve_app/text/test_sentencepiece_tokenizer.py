import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import TokenizerError
from serve_app.text.sentencepiece_tokenizer import load_sentencepiece_tokenizer
from serve_app.text.tokenizer import Tokenizer, load_tokenizer
from tests.serve_app.text.makers import AWKWARD, train_sentencepiece


def with_config(source: Path, tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(source.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path / "tokenizer.model"


def test_a_bare_model_adds_nothing_as_the_library(sentencepiece_path: Path) -> None:
    tokenizer = load_sentencepiece_tokenizer(sentencepiece_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_path))
    text = "the fox\n runs  é"
    assert tokenizer.encode(text, add_special_tokens=True) == library.encode(text)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@settings(deadline=None)
@given(text=st.text(alphabet="the é日🙂\n", max_size=20))
def test_valid_text_decodes_as_by_the_library(sentencepiece_path: Path, text: str) -> None:
    tokenizer = load_sentencepiece_tokenizer(sentencepiece_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_path))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == library.decode(ids)


def test_control_pieces_in_text_are_recognised_where_asked(sentencepiece_path: Path) -> None:
    tokenizer = load_sentencepiece_tokenizer(sentencepiece_path)
    first, second = (tokenizer.encode(t, add_special_tokens=False) for t in ("the", "fox"))
    assert tokenizer.encode("the</s>fox", add_special_tokens=False) == [*first, 2, *second]
    plain = tokenizer.encode("the</s>fox", add_special_tokens=False, parse_special=False)
    assert 2 not in plain
    assert tokenizer.decode(plain) == "the</s>fox"


def test_user_defined_pieces_are_text_that_decode_keeps(sentencepiece_path: Path) -> None:
    tokenizer = load_sentencepiece_tokenizer(sentencepiece_path)
    separator = 4
    assert tokenizer.token_text(separator) == "<|separator|>"
    ids = tokenizer.encode("the<|separator|>", add_special_tokens=False)
    assert ids[-1] == separator
    assert tokenizer.decode(ids) == "the<|separator|>"
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_the_dummy_prefix_is_known_from_the_model(tmp_path: Path, sentencepiece_path: Path) -> None:
    without = load_tokenizer(train_sentencepiece(tmp_path / "a.model", add_dummy_prefix=False))
    assert not without.strips_leading_space
    assert without.decode(without.encode(" the", add_special_tokens=False)) == " the"
    assert load_tokenizer(sentencepiece_path).strips_leading_space


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"bos_token": "</s>"}, [2], []),
    ],
)
def test_a_config_decides_about_bos(
    tmp_path: Path, sentencepiece_path: Path, config: dict[str, Any], before: list[int], after: list[int]
) -> None:
    tokenizer = load_sentencepiece_tokenizer(with_config(sentencepiece_path, tmp_path, **config))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=True) == [*before, *plain, *after]


def test_the_configs_chat_template_is_read(tmp_path: Path, sentencepiece_path: Path) -> None:
    path = with_config(sentencepiece_path, tmp_path, chat_template="{{ messages }}")
    assert load_tokenizer(path.parent).chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "<end>"}, "eos_token is '<end>', which is no token of tokenizer.model"),
        ({"added_tokens_decoder": {"380": {"content": "<x>"}}}, "adds tokens that tokenizer.model does not hold"),
        ({"added_tokens_decoder": {"1": {"content": "<x>"}}}, "adds tokens that tokenizer.model does not hold"),
    ],
)
def test_a_config_that_contradicts_the_model_is_refused(
    tmp_path: Path, sentencepiece_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message):
        load_sentencepiece_tokenizer(with_config(sentencepiece_path, tmp_path, **config))


@pytest.fixture(scope="module")
def grok1(grok1_path: Path) -> Tokenizer:
    return load_tokenizer(grok1_path)


def test_grok1_has_its_131072_tokens(grok1: Tokenizer) -> None:
    assert grok1.vocab_size == 131072
    assert (grok1.bos_token, grok1.eos_token) == ("[BOS]", "[EOS]")
    assert grok1.special_token_ids == {0, 1, 2, 3}


@pytest.mark.parametrize("text", [*AWKWARD, "a<|separator|>b", "\U0001f9ff \U000e0041"])
def test_grok1_loses_no_text_and_agrees_with_the_library(grok1: Tokenizer, grok1_path: Path, text: str) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(grok1_path))
    ids = grok1.encode(text, add_special_tokens=True)
    assert ids == library.encode(text)
    assert grok1.decode(ids) == library.decode(ids) == text
