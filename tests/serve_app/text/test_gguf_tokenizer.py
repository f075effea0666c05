import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from engine.errors import TokenizerError
from serve_app.text.chat import ChatTemplate
from serve_app.text.gguf_fields import read_gguf_fields
from serve_app.text.gguf_tokenizer import load_gguf_tokenizer
from serve_app.text.tokenizer import Tokenizer, load_tokenizer

REFERENCE = Path(__file__).parents[3] / "../shared/data/smollm2/reference.json"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "123 4", "l l", "' ll", "L L", "' LL", "\u0120 1"]
TOKENS = [
    "<pad>",
    "<s>",
    "</s>",
    "<eot>",
    "<tool é>",
    *ALPHABET,
    *(m.replace(" ", "") for m in MERGES),
    "hello",
    "[PAD]",
]
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5


def write_gguf(path: Path, pre: str | None = "gpt-2", model: str = "gpt2", **values: Any) -> Path:
    """A GGUF file with a tokenizer and no tensors; `values` add to or replace (None: remove) its metadata."""
    types = [CONTROL] * 4 + [USER_DEFINED] + [1] * (len(TOKENS) - 6) + [UNUSED]
    fields = {
        "pre": pre,
        "tokens": TOKENS,
        "token_type": types,
        "merges": MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **values,
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", model)
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.add_string("tokenizer.chat_template", "{{ bos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234 1", ["1234", " 1"]),
        ("smollm", "1234 1", ["1", "2", "3", "4", " ", "1"]),
        ("llama-bpe", "1234 1", ["123", "4", " ", "1"]),
        ("qwen2", "1234 1", ["1", "2", "3", "4", " ", "1"]),
        ("gpt-2", "I'll'LL", ["I", "'ll", "'", "LL"]),
        ("smollm", "I'll'LL", ["I", "'ll", "'", "LL"]),
        ("llama-bpe", "I'll'LL", ["I", "'ll", "'LL"]),
        ("qwen2", "I'll'LL", ["I", "'ll", "'LL"]),
        ("gpt-2", "hello", ["h", "e", "ll", "o"]),
        ("llama-bpe", "hello", ["hello"]),
        ("qwen2", "e\u0301", ["\ufffd", "\ufffd"]),
        ("gpt-2", "e\u0301", ["e", "\ufffd", "\ufffd"]),
    ],
)
def test_each_pre_tokenizer_splits_words_its_own_way(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    assert pieces(load_gguf_tokenizer(write_gguf(tmp_path / "a.gguf", pre)), text) == expected


def test_the_other_names_of_llama_3s_pre_tokenizer_are_known(tmp_path: Path) -> None:
    for pre in ("llama3", "llama-v3"):
        assert pieces(load_gguf_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", pre)), "1234") == ["123", "4"]


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"'tekken', which is not known here; known ones: gpt-2, llama-bpe"):
        load_gguf_tokenizer(write_gguf(tmp_path / "a.gguf", "tekken"))


def test_an_unknown_tokenizer_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="model 'rwkv'"):
        load_gguf_tokenizer(write_gguf(tmp_path / "a.gguf", model="rwkv"))


def test_token_types_say_what_is_special(tmp_path: Path) -> None:
    tokenizer = load_gguf_tokenizer(write_gguf(tmp_path / "a.gguf", eot_token_id=3))
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert (tokenizer.bos_token_id, tokenizer.bos_token) == (1, "<s>")
    assert (tokenizer.eos_token_ids, tokenizer.eos_token) == ((2, 3), "</s>")
    assert tokenizer.chat_template == "{{ bos_token }}"
    ids = tokenizer.encode("<s>a<tool é></s>", add_special_tokens=False)
    assert ids == [1, TOKENS.index("a"), 4, 2]
    assert tokenizer.decode(ids) == "a<tool é>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a<tool é></s>"


def test_tokens_that_only_fill_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    tokenizer = load_gguf_tokenizer(write_gguf(tmp_path / "a.gguf"))
    assert tokenizer.decode([len(TOKENS) - 1]) == ""
    assert tokenizer.decode(tokenizer.encode("[PAD]", add_special_tokens=False)) == "[PAD]"


def test_special_tokens_are_text_where_asked(tmp_path: Path) -> None:
    tokenizer = load_gguf_tokenizer(write_gguf(tmp_path / "a.gguf"))
    ids = tokenizer.encode("<s>", add_special_tokens=False, parse_special=False)
    assert [tokenizer.token_text(i) for i in ids] == ["<", "s", ">"]
    assert tokenizer.encode("<s>", add_special_tokens=False) == [1]


@pytest.mark.parametrize(
    ("pre", "values", "before", "after"),
    [
        ("gpt-2", {}, [], []),
        ("llama-bpe", {}, [1], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_the_file_or_else_the_pre_tokenizer_decides_about_bos(
    tmp_path: Path, pre: str, values: dict[str, Any], before: list[int], after: list[int]
) -> None:
    tokenizer = load_gguf_tokenizer(write_gguf(tmp_path / "a.gguf", pre, **values))
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert plain == [TOKENS.index("a")]
    assert tokenizer.encode("a", add_special_tokens=True) == [*before, *plain, *after]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pre": None}, r"has no tokenizer\.ggml\.pre"),
        ({"tokens": None}, r"has no tokenizer\.ggml\.tokens"),
        ({"tokens": [1, 2]}, "other than strings"),
        ({"tokens": "abc"}, "is a str; expected a list"),
        ({"tokens": [*TOKENS[:-1], "a"]}, "1 tokens that are spelled like another"),
        ({"token_type": [1, 2]}, f"{len(TOKENS)} tokens and 2 token types"),
        ({"token_type": [9] * len(TOKENS)}, "9 is not a valid TokenType"),
        ({"merges": ["1 nowhere"]}, "do not fit together"),
        ({"token_type": [1] * (len(TOKENS) - 1) + [6]}, "byte tokens in a byte-level vocabulary"),
        ({"merges": ["12"]}, "do not fit together"),
        ({"eos_token_id": 10_000}, "eos_token_id is 10000, outside of the vocabulary"),
        ({"bos_token_id": None, "add_bos_token": True}, "asks for a BOS token"),
        ({"eos_token_id": None, "add_eos_token": True}, "asks for an EOS token"),
        ({"add_bos_token": 1}, "add_bos_token is a int; expected a bool"),
    ],
)
def test_metadata_that_cannot_work_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.gguf"
    with pytest.raises(TokenizerError, match=message) as raised:
        load_gguf_tokenizer(write_gguf(path, **values))
    assert str(path) in str(raised.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(TokenizerError, match="truncated"):
        load_gguf_tokenizer(path)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    if not REFERENCE.exists():
        pytest.skip("the reference data is not beside the checkout")
    return json.loads(REFERENCE.read_text())


def test_smollm2_gives_the_reference_tokens(smollm2: Tokenizer, reference: dict[str, Any]) -> None:
    for case in reference["tokenisation"]:
        ids = smollm2.encode(case["text"], add_special_tokens=True)
        assert ids == case["ids"]
        assert smollm2.decode(ids, skip_special_tokens=False) == case["text"]


def test_smollm2_recognises_special_tokens_in_prompts(smollm2: Tokenizer, reference: dict[str, Any]) -> None:
    for case in reference["completions"]:
        assert smollm2.encode(case["prompt"], add_special_tokens=True) == case["prompt_ids"]
        assert smollm2.decode(case["greedy_ids"]) == case["greedy_text"]


def test_smollm2_chats_are_rendered_and_tokenized_as_the_reference(
    smollm2: Tokenizer, reference: dict[str, Any]
) -> None:
    assert smollm2.chat_template is not None
    template = ChatTemplate(smollm2.chat_template, smollm2.bos_token, smollm2.eos_token)
    for case in reference["chat"]:
        rendered = template.render(case["messages"])
        assert rendered == case["rendered"]
        assert smollm2.encode(rendered, add_special_tokens=False) == case["ids"]
        assert smollm2.decode(case["greedy_ids"]) == case["greedy_text"]


def test_smollm2_drops_the_bytes_that_its_vocabulary_lacks(smollm2: Tokenizer) -> None:
    lost = [c for c in map(chr, range(128)) if smollm2.decode(smollm2.encode(c, add_special_tokens=False)) != c]
    assert lost == list("\x04\x06\x13\x14\x16\x1d")


def test_smollm2_names_its_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.eos_token_ids) == ("<|im_start|>", "<|im_end|>", (2,))
    assert smollm2.special_token_ids == set(range(17))


@pytest.fixture(scope="module")
def smollm2_backend(smollm2_path: Path) -> tokenizers.Tokenizer:
    """The same vocabulary, decoded by the package."""
    tokens = read_gguf_fields(smollm2_path).strings("tokenizer.ggml.tokens")
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return backend


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=20))
def test_smollm2_decodes_as_the_tokenizers_package(
    smollm2_backend: tokenizers.Tokenizer, smollm2: Tokenizer, ids: list[int]
) -> None:
    assert smollm2.decode(ids, skip_special_tokens=False) == smollm2_backend.decode(ids, skip_special_tokens=False)
