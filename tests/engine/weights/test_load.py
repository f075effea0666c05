import json
import weakref
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.errors import CheckpointError
from engine.weights.families import FAMILIES
from engine.weights.hf import HFSource
from engine.weights.load import load_config, load_params, open_source
from engine.weights.loader import Loader
from engine.weights.plan import plan_params

from .checkpoints import (
    LLAMA_CONFIG,
    MIXTRAL_CONFIG,
    llama_tensors,
    mixtral_tensors,
    reference_dir,
    write_checkpoint,
    write_sharded,
)
from .torch_builder import write_state_dict, write_torch_index
from .trees import abstract_tree, mesh_of, sharding_on


def load(path: Path, num_devices: int = 1, dtype=jnp.float32, progress=None):
    config = load_config(path)
    return load_params(path, config, abstract_tree(config, dtype), sharding_on(mesh_of(num_devices)), progress)


def attention_names(layer: int) -> dict[str, str]:
    prefix = f"model.layers.{layer}"
    return {
        f"layer_{layer}/attention_norm/scale": f"{prefix}.input_layernorm.weight",
        f"layer_{layer}/attention/q/w": f"{prefix}.self_attn.q_proj.weight",
        f"layer_{layer}/attention/k/w": f"{prefix}.self_attn.k_proj.weight",
        f"layer_{layer}/attention/v/w": f"{prefix}.self_attn.v_proj.weight",
        f"layer_{layer}/attention/o/w": f"{prefix}.self_attn.o_proj.weight",
        f"layer_{layer}/ffn_norm/scale": f"{prefix}.post_attention_layernorm.weight",
    }


def ffn_names(layer: int) -> dict[str, str]:
    prefix = f"model.layers.{layer}.mlp"
    return {
        f"layer_{layer}/ffn/gate/w": f"{prefix}.gate_proj.weight",
        f"layer_{layer}/ffn/up/w": f"{prefix}.up_proj.weight",
        f"layer_{layer}/ffn/down/w": f"{prefix}.down_proj.weight",
    }


def qk_norm_names(layer: int) -> dict[str, str]:
    prefix = f"model.layers.{layer}.self_attn"
    return {
        f"layer_{layer}/attention/q_norm/scale": f"{prefix}.q_norm.weight",
        f"layer_{layer}/attention/k_norm/scale": f"{prefix}.k_norm.weight",
    }


def qkv_bias_names(layer: int) -> dict[str, str]:
    prefix = f"model.layers.{layer}.self_attn"
    return {f"layer_{layer}/attention/{name}/b": f"{prefix}.{name}_proj.bias" for name in ("q", "k", "v")}


def mixtral_names(layer: int) -> dict[str, str]:
    prefix = f"model.layers.{layer}.block_sparse_moe"
    return {
        f"layer_{layer}/moe/router/w": f"{prefix}.gate.weight",
        f"layer_{layer}/moe/gate/w": f"{prefix}.experts.*.w1.weight",
        f"layer_{layer}/moe/down/w": f"{prefix}.experts.*.w2.weight",
        f"layer_{layer}/moe/up/w": f"{prefix}.experts.*.w3.weight",
    }


def qwen3_moe_names(layer: int) -> dict[str, str]:
    prefix = f"model.layers.{layer}.mlp"
    return {
        f"layer_{layer}/moe/router/w": f"{prefix}.gate.weight",
        f"layer_{layer}/moe/gate/w": f"{prefix}.experts.*.gate_proj.weight",
        f"layer_{layer}/moe/up/w": f"{prefix}.experts.*.up_proj.weight",
        f"layer_{layer}/moe/down/w": f"{prefix}.experts.*.down_proj.weight",
    }


def assert_params_equal_file(params, tensors, *names_of_layer, num_layers=3, dtype=np.float32):
    """Every parameter is what the file holds under the names written out above, and there is no other."""
    expected = {"embed/w": tensors["model.embed_tokens.weight"], "final_norm/scale": tensors["model.norm.weight"]}
    if "lm_head.weight" in tensors:
        expected["lm_head/w"] = tensors["lm_head.weight"]
    for layer in range(num_layers):
        for path, name in (item for names in names_of_layer for item in names(layer).items()):
            expected[path] = _tensor(tensors, name)
    found = {f"{module}/{name}": array for module, rest in params.items() for name, array in rest.items()}
    assert found.keys() == expected.keys()
    for path, array in found.items():
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, np.asarray(expected[path]).astype(dtype), err_msg=path)


def _tensor(tensors, name):
    if "*" not in name:
        return tensors[name]
    num_experts = sum(1 for expert in range(100) if name.replace("*", str(expert)) in tensors)
    return [tensors[name.replace("*", str(expert))] for expert in range(num_experts)]


REFERENCES = {
    "llama-tiny": (attention_names, ffn_names),
    "llama3-rope-tiny": (attention_names, ffn_names),
    "mistral-window-tiny": (attention_names, ffn_names),
    "qwen2-tiny": (attention_names, ffn_names, qkv_bias_names),
    "qwen3-tiny": (attention_names, ffn_names, qk_norm_names),
    "mixtral-tiny": (attention_names, mixtral_names),
    "qwen3-moe-tiny": (attention_names, qk_norm_names, qwen3_moe_names),
}


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("name", REFERENCES)
def test_reference_checkpoints_are_loaded_whole(name, num_devices):
    path = reference_dir(f"hf/{name}")
    assert_params_equal_file(load(path, num_devices), load_file(path / "model.safetensors"), *REFERENCES[name])


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("write_files", [write_checkpoint, write_sharded])
@pytest.mark.parametrize("file_dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_a_llama_of_one_or_more_files(tmp_path, num_devices, write_files, file_dtype):
    tensors = {name: tensor.astype(file_dtype) for name, tensor in llama_tensors().items()}
    path = write_files(tmp_path, LLAMA_CONFIG, tensors)
    assert_params_equal_file(load(path, num_devices), tensors, attention_names, ffn_names)


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("target", [jnp.float32, jnp.bfloat16])
def test_a_mixture_of_experts(tmp_path, num_devices, target):
    tensors = mixtral_tensors()
    path = write_checkpoint(tmp_path, MIXTRAL_CONFIG, tensors)
    params = load(path, num_devices, target)
    assert_params_equal_file(params, tensors, attention_names, mixtral_names, dtype=target)


PI05_LAYER = {
    "attention_norm/scale": "input_layernorm.weight",
    "attention_norm/bias": "input_layernorm.bias",
    "ffn_norm/scale": "post_attention_layernorm.weight",
    "ffn_norm/bias": "post_attention_layernorm.bias",
    "ffn/up/w": "mlp.fc1.weight",
    "ffn/up/b": "mlp.fc1.bias",
    "ffn/down/w": "mlp.fc2.weight",
    "ffn/down/b": "mlp.fc2.bias",
} | {f"attention/{p}/w": f"self_attn.{p}_proj.weight" for p in "qkvo"}


@pytest.mark.parametrize("num_devices", [1, 4])
def test_pi05_with_biases_in_its_first_layer_only(num_devices):
    path = reference_dir("hf/pi05-tiny")
    tensors = load_file(path / "model.safetensors")
    params = load(path, num_devices)
    flat = {f"{module}/{name}": np.asarray(array) for module, rest in params.items() for name, array in rest.items()}
    for layer in range(3):
        for projection in "qkvo":
            name = f"model.layers.{layer}.self_attn.{projection}_proj.bias"
            bias = flat.pop(f"layer_{layer}/attention/{projection}/b")
            np.testing.assert_array_equal(bias, tensors[name] if layer == 0 else np.zeros(64))
        for path, name in PI05_LAYER.items():
            np.testing.assert_array_equal(flat.pop(f"layer_{layer}/{path}"), tensors[f"model.layers.{layer}.{name}"])
    np.testing.assert_array_equal(flat.pop("final_norm/bias"), tensors["model.norm.bias"])
    assert flat.keys() == {"embed/w", "lm_head/w", "final_norm/scale"}


PI05_BIASES = [f"self_attn.{projection}_proj.bias" for projection in "qkvo"]


def changed_pi05(tmp_path, attention_bias, without=(), **more):
    """A copy of the tiny checkpoint with another statement on its biases, and some tensors more or less."""
    path = reference_dir("hf/pi05-tiny")
    tensors = load_file(path / "model.safetensors") | more
    config = json.loads((path / "config.json").read_text()) | {"attention_bias": attention_bias}
    return write_checkpoint(tmp_path / "model", config, {n: t for n, t in tensors.items() if n not in without})


def test_pi05_with_biases_in_other_layers(tmp_path):
    of_layer_2 = {f"model.layers.2.{name}": np.full(64, 2 + i, np.float32) for i, name in enumerate(PI05_BIASES)}
    params = load(changed_pi05(tmp_path, [0, 2], **of_layer_2))
    assert np.abs(params["layer_0/attention/q"]["b"]).max() > 0.1
    for i, projection in enumerate("qkvo"):
        np.testing.assert_array_equal(params[f"layer_1/attention/{projection}"]["b"], np.zeros(64))
        np.testing.assert_array_equal(params[f"layer_2/attention/{projection}"]["b"], np.full(64, 2 + i))


def test_pi05_without_attention_biases(tmp_path):
    without = [f"model.layers.0.{name}" for name in PI05_BIASES]
    params = load(changed_pi05(tmp_path, False, without))
    assert "b" not in params["layer_0/attention/q"]
    assert "b" in params["layer_0/ffn/up"]


@pytest.mark.parametrize(
    ("attention_bias", "without", "message"),
    [
        (
            "first layer only",
            ["model.layers.0.self_attn.k_proj.bias"],
            r"k_proj\.bias' \(for layer_0/attention/k/b\) mis",
        ),
        (True, [], r"'model\.layers\.1\.self_attn\.k_proj\.bias' \(for layer_1/attention/k/b\)"),
        (False, [], r"k_proj\.bias' \(for layer_0/attention/k/b\), .* left over"),
        ([1], [], r"'model\.layers\.1\.self_attn\.k_proj\.bias' \(for layer_1/attention/k/b\)"),
    ],
)
def test_biases_that_are_not_where_the_config_says_are_refused(tmp_path, attention_bias, without, message):
    with pytest.raises(CheckpointError, match=message):
        load(changed_pi05(tmp_path, attention_bias, without))


def as_torch(directory, num_files=1):
    """The llama of `llama_tensors` in PyTorch's files."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    tensors = llama_tensors()
    if num_files == 1:
        write_state_dict(directory / "pytorch_model.bin", tensors)
        return directory
    weight_map = {}
    for i in range(num_files):
        names = sorted(tensors)[i::num_files]
        file = f"pytorch_model-{i + 1:05}-of-{num_files:05}.bin"
        write_state_dict(directory / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    write_torch_index(directory, weight_map)
    return directory


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("num_devices", [1, 8])
def test_state_dicts_are_loaded_as_safetensors_are(tmp_path, num_files, num_devices):
    path = as_torch(tmp_path / "model", num_files)
    assert_params_equal_file(load(path, num_devices), llama_tensors(), attention_names, ffn_names)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "weights.pt", "weights.pth"])
def test_a_state_dict_is_named_by_its_file(tmp_path, name):
    path = write_checkpoint(as_torch(tmp_path / "model"), LLAMA_CONFIG, llama_tensors())
    for suffix in (".pt", ".pth"):
        (path / "pytorch_model.bin").with_name(f"weights{suffix}").write_bytes(
            (path / "pytorch_model.bin").read_bytes()
        )
    opened, _ = open_source(path / name, load_config(path / name))
    assert {info.file.name for info in opened.tensors.values()} == {name}
    assert_params_equal_file(load(path / name), llama_tensors(), attention_names, ffn_names)


def test_of_both_formats_the_safetensors_are_read(tmp_path):
    path = write_checkpoint(as_torch(tmp_path / "model"), LLAMA_CONFIG, llama_tensors())
    (path / "pytorch_model.bin").write_bytes(b"damaged")
    assert_params_equal_file(load(path), llama_tensors(), attention_names, ffn_names)


def test_a_folder_without_weights_is_refused_with_what_was_expected(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    with pytest.raises(
        CheckpointError, match=r"no weights; expected one of model\.safetensors, .*pytorch_model\.bin\.ind"
    ):
        load(tmp_path)


def test_parameters_lie_where_they_were_asked_to(tmp_path):
    path = write_checkpoint(tmp_path, LLAMA_CONFIG, llama_tensors())
    sharding_for = sharding_on(mesh_of(8))
    config = load_config(path)
    params = load_params(path, config, abstract_tree(config), sharding_for)
    up = params["layer_1/ffn/up"]["w"]
    assert up.sharding == sharding_for("layer_1/ffn/up/w", up.shape)
    assert up.addressable_shards[0].data.shape == (2, 10)


def test_a_tied_head_that_equals_the_embedding_is_no_surplus(tmp_path):
    tensors = llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    path = write_checkpoint(tmp_path, LLAMA_CONFIG | {"tie_word_embeddings": True}, tensors)
    assert "lm_head" not in load(path)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, LLAMA_CONFIG | {"tie_word_embeddings": True}, llama_tensors())
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        load(path)


def test_saved_rotary_frequencies_are_no_surplus(tmp_path):
    tensors = llama_tensors()
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32) for i in range(3)}
    assert_params_equal_file(
        load(write_checkpoint(tmp_path, LLAMA_CONFIG, tensors | extra)), tensors, attention_names, ffn_names
    )


NAN = np.zeros((16, 10), np.float32)
NAN[3, 4] = np.nan
INFINITE = np.zeros((40, 10), np.float32)
INFINITE[39, 9] = -np.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.layers.1.mlp.up_proj.weight": None},
            r"'model\.layers\.1\.mlp\.up_proj\.weight' \(for layer_1/ffn",
        ),
        ({"lm_head.weight": None}, r"'lm_head\.weight' \(for lm_head/w\) missing"),
        (
            {"model.layers.3.mlp.up_proj.weight": NAN},
            r"'model\.layers\.3\.mlp\.up_proj\.weight' \(for layer_3/ffn/up/w\) left over",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": NAN[:, 0].copy()},
            r"q_proj\.bias' \(for layer_0/attention/q/b\) left over",
        ),
        (
            {"model.layers.2.mlp.down_proj.weight": np.zeros((16, 10), np.float32)},
            r"model\.safetensors: tensor 'model\.layers\.2\.mlp\.down_proj\.weight' has shape \[16, 10\]; the config "
            r"asks for \[10, 16\] \(layer_2/ffn/down/w\)",
        ),
        ({"model.embed_tokens.weight": np.zeros((41, 10), np.float32)}, r"has shape \[41, 10\]; .* \[40, 10\]"),
        ({"model.norm.weight": np.zeros(10, np.int8)}, r"'model\.norm\.weight' has dtype int8; expected one of"),
        ({"model.norm.weight": np.zeros(10, ml_dtypes.float8_e4m3fn)}, "has dtype float8_e4m3fn"),
        ({"model.layers.1.mlp.gate_proj.weight": NAN}, r"'model\.layers\.1\.mlp\.gate_proj\.weight' holds NaN"),
        ({"lm_head.weight": INFINITE}, r"'lm_head\.weight' holds NaN or infinite values"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path, changes, message):
    tensors = llama_tensors() | changes
    path = write_checkpoint(tmp_path, LLAMA_CONFIG, {name: t for name, t in tensors.items() if t is not None})
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_long_lists_of_missing_tensors_are_cut(tmp_path):
    tensors = {name: t for name, t in llama_tensors().items() if "self_attn" not in name}
    with pytest.raises(CheckpointError, match=r"^.*: 12 tensors \(.*, and 7 more\) missing from the checkpoint"):
        load(write_checkpoint(tmp_path, LLAMA_CONFIG, tensors))


def test_nothing_is_read_where_a_name_is_wrong(tmp_path):
    path = write_checkpoint(tmp_path, LLAMA_CONFIG, llama_tensors() | {"surplus": np.ones(3, np.float32)})
    config = load_config(path)

    class Unreadable(HFSource):
        def read(self, name: str) -> np.ndarray:
            raise AssertionError(f"{name} was read")

    with closing(Unreadable(path)) as source, pytest.raises(CheckpointError, match="'surplus' left over"):
        plan_params(source, FAMILIES["llama"].weights, config, abstract_tree(config))


def test_a_parameter_that_the_family_does_not_know_is_named(tmp_path):
    path = write_checkpoint(tmp_path, LLAMA_CONFIG, llama_tensors())
    config = load_config(path)
    abstract = abstract_tree(config) | {"soft_prompt": {"w": jax.ShapeDtypeStruct((3, 10), jnp.float32)}}
    with pytest.raises(CheckpointError, match="'soft_prompt/w', for which its family knows no tensor"):
        load_params(path, config, abstract, sharding_on(mesh_of(1)))


def test_a_value_beyond_the_target_dtype_is_named(tmp_path):
    tensors = llama_tensors()
    tensors["model.norm.weight"][4] = 70000.0
    path = write_checkpoint(tmp_path, LLAMA_CONFIG, tensors)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' holds a value of magnitude 70000, above 65504"):
        load(path, dtype=jnp.float16)
    assert load(path, dtype=jnp.bfloat16)["final_norm"]["scale"][4] == jnp.bfloat16(70000.0)


def test_progress_counts_every_byte_once(tmp_path):
    tensors = llama_tensors()
    calls = []
    load(write_checkpoint(tmp_path, LLAMA_CONFIG, tensors), progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert [call[0] for call in calls] == np.cumsum([tensors[name].nbytes for _, _, name in calls]).tolist()
    assert calls[-1][0] == total
    assert {call[1] for call in calls} == {total}
    assert sorted(call[2] for call in calls) == sorted(tensors)


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_host_holds_one_expert_for_each_thread(tmp_path, num_devices, num_threads):
    path = write_checkpoint(tmp_path, MIXTRAL_CONFIG, mixtral_tensors())
    config = load_config(path)
    alive: list[weakref.ref] = []
    most_alive = 0

    class Counting(HFSource):
        def read(self, name: str) -> np.ndarray:
            nonlocal most_alive
            array = super().read(name)
            if "layers" in name:
                alive.append(weakref.ref(array))
            most_alive = max(most_alive, sum(ref() is not None for ref in alive))
            return array

    with closing(Counting(path)) as source:
        sharding_for = sharding_on(mesh_of(num_devices))
        weights = FAMILIES["mixtral"].weights
        plans = plan_params(source, weights, config, abstract_tree(config))
        Loader(source, weights, config, sharding_for).load(plans, num_threads=num_threads)
    assert len(alive) == 93
    assert most_alive <= num_threads
