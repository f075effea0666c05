import dataclasses
import gc
import json
import threading
import tracemalloc

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from engine.config import ModelConfig, MoEConfig
from engine.engine import build_engine
from engine.errors import CheckpointError
from engine.models.decoder import Decoder
from engine.sharding import make_mesh, param_sharding
from engine.verify import compare, engine_config, load_references
from engine.weights import grok1
from engine.weights.grok1 import Grok1Source
from engine.weights.load import load_config, load_params

from .checkpoints import reference_dir
from .grok1_checkpoints import CONFIG, QuantizedWeight8bit, exact_values, make_tensors, pickle_tensor, write_grok1
from .trees import abstract_tree, int8_tree, mesh_of, sharding_on

LAYER_NAMES = {
    "attention_norm/scale": "rms_norm/scale",
    "attention_post_norm/scale": "rms_norm_1/scale",
    "ffn_norm/scale": "rms_norm_2/scale",
    "ffn_post_norm/scale": "rms_norm_3/scale",
    "attention/q/w": "multi_head_attention/query/w",
    "attention/k/w": "multi_head_attention/key/w",
    "attention/v/w": "multi_head_attention/value/w",
    "attention/o/w": "multi_head_attention/linear/w",
    "moe/router/w": "router/w",
    "moe/gate/w": "moe/linear/w",
    "moe/up/w": "moe/linear_v/w",
    "moe/down/w": "moe/linear_1/w",
}


def names(num_layers):
    pairs = {"embed/w": "language_model/in_out_embed/embeddings", "final_norm/scale": "language_model/rms_norm/scale"}
    for layer in range(num_layers):
        pairs |= {f"layer_{layer}/{k}": f"transformer/decoder_layer_{layer}/{v}" for k, v in LAYER_NAMES.items()}
    return pairs


def flat(params):
    return {f"{module}/{name}": np.asarray(array) for module, rest in params.items() for name, array in rest.items()}


def turned(path, values):
    return np.swapaxes(values, -1, -2) if path.endswith("/w") and path != "embed/w" else values


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tensors = make_tensors()
    return write_grok1(tmp_path_factory.mktemp("grok1"), tensors), tensors


def load(path, abstract=None, num_devices=1, **options):
    config = load_config(path)
    abstract = abstract_tree(config) if abstract is None else abstract
    return load_params(path, config, abstract, sharding_on(mesh_of(num_devices)), **options)


def test_the_release_is_known_without_a_config(tmp_path):
    (tmp_path / "ckpt-0").mkdir()
    for index in range(770):
        (tmp_path / "ckpt-0" / f"tensor{index:05}_000").touch()
    assert load_config(tmp_path) == ModelConfig(
        family="grok-1",
        vocab_size=131072,
        hidden_size=6144,
        num_layers=64,
        num_heads=48,
        num_kv_heads=8,
        head_size=128,
        intermediate_size=32768,
        max_position_embeddings=8192,
        norm_eps=1e-5,
        activation="gelu_tanh",
        rope_theta=10000.0,
        post_norms=True,
        tie_embeddings=True,
        attention_scale=0.08838834764831845,
        attention_softcap=30.0,
        embedding_multiplier=78.38367176906169,
        output_multiplier=0.5773502691896257,
        moe=MoEConfig(8, 2, 32768, renormalize=False),
        eos_token_ids=(2,),
    )


def test_without_a_config_an_incomplete_release_is_refused(tmp_path):
    (tmp_path / "ckpt-0").mkdir()
    (tmp_path / "ckpt-0" / "tensor00000_000").touch()
    with pytest.raises(
        CheckpointError, match=r"no config\.json, and ckpt-0 holds 1 tensor files, not the 770 of the Grok-1"
    ):
        load_config(tmp_path)


@pytest.mark.parametrize(("widen", "emb", "width"), [(8, 6144, 32768), (2, 256, 344), (2, 24, 32), (2, 12, 16)])
def test_the_feed_forward_width_is_rounded_up_to_a_multiple_of_8(tmp_path, widen, emb, width):
    path = write_grok1(tmp_path, {}, CONFIG | {"widen": widen, "emb": emb})
    assert load_config(path).moe.intermediate_size == width


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, r"config\.json: q is missing"),
        ({"kv": 3}, "4 query heads cannot share 3 KV heads"),
        ({"emb_mult": -1}, "emb_mult is -1; expected a positive number"),
        ({"rope": 1e4}, "'rope' is not a key of a Grok-1 config"),
    ],
)
def test_a_config_that_is_wrong_is_refused_by_key(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load_config(write_grok1(tmp_path, {}, CONFIG | changes))


def test_the_order_of_the_files_is_that_of_the_reference():
    listed = json.loads((reference_dir("grok1/tiny") / "tensors.json").read_text())
    assert [f"params/{name}" for _, name in grok1._file_order(3)] == [name for name, _, _ in listed]


def test_layer_10_comes_before_layer_2():
    order = [path for path, _ in grok1._file_order(64)]
    assert len(order) == 770
    assert order[:2] == ["embed/w", "final_norm/scale"]
    layers = [int(path.split("/")[0].removeprefix("layer_")) for path in order[2::12]]
    assert layers[:4] == [0, 1, 10, 11]
    assert sorted(layers) == list(range(64))


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_tensor_is_widened_into_its_place(checkpoint, num_devices, dtype):
    path, tensors = checkpoint
    params = flat(load(path, abstract_tree(load_config(path), dtype), num_devices))
    assert params.keys() == names(11).keys()
    for param, name in names(11).items():
        assert params[param].dtype == dtype
        expected = turned(param, exact_values(tensors[name])).astype(dtype)
        np.testing.assert_array_equal(params[param], expected, err_msg=param)


@pytest.mark.parametrize("num_devices", [1, 4, 8])
@pytest.mark.parametrize(("input_groups", "output_groups"), [(1, 4), (2, 8)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_int8_is_taken_as_it_is(checkpoint, num_devices, input_groups, output_groups, dtype):
    path, tensors = checkpoint
    errors = []
    abstract = int8_tree(load_config(path), input_groups, output_groups, dtype)
    params = flat(load(path, abstract, num_devices, report=errors.append))
    assert errors == []
    for param, name in names(11).items():
        tensor = tensors[name]
        if not isinstance(tensor, QuantizedWeight8bit):
            continue
        assert params[param].dtype == np.int8
        np.testing.assert_array_equal(params[param], turned(param, tensor.weight), err_msg=param)
        scale = params[f"{param.removesuffix('w')}scale"]
        groups = output_groups if "/o/" in param or "/down/" in param else input_groups
        assert scale.dtype == dtype
        expected = np.repeat(turned(param, tensor.scales), groups // tensor.scales.shape[-2], axis=-1)
        np.testing.assert_array_equal(scale, expected.astype(dtype), err_msg=param)


@pytest.mark.parametrize("expert_sharding", ["width", "expert"])
@pytest.mark.parametrize("model", [2, 4])
def test_the_engines_own_shardings(checkpoint, expert_sharding, model):
    path, tensors = checkpoint
    config, mesh = load_config(path), make_mesh(2, model)

    def sharding_for(path, shape):
        return param_sharding(path, shape, mesh, expert_sharding)

    params = load_params(path, config, int8_tree(config, 1, 8), sharding_for)
    down = params["layer_7/moe/down"]
    weight = tensors["transformer/decoder_layer_7/moe/linear_1/w"].weight
    assert down["w"].sharding == sharding_for("layer_7/moe/down/w", down["w"].shape)
    assert down["scale"].sharding == sharding_for("layer_7/moe/down/scale", down["scale"].shape)
    for shard in down["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.swapaxes(weight, -1, -2)[shard.index])


def test_groups_that_a_file_cannot_give_are_refused(checkpoint):
    path, _ = checkpoint
    with pytest.raises(CheckpointError, match=r"has 4 groups of inputs with a scale each; layer_0/.* cannot have 6"):
        load(path, int8_tree(load_config(path), 1, 6))
    with pytest.raises(CheckpointError, match="24 inputs cannot be divided into 5 groups"):
        load(path, int8_tree(load_config(path), 5, 8))


@pytest.mark.parametrize("index", [0, 1, 2, 9, 133])
def test_a_missing_file_is_named_with_its_parameter(checkpoint, tmp_path, index):
    _, tensors = checkpoint
    path = write_grok1(tmp_path, tensors)
    (path / "ckpt-0" / f"tensor{index:05}_000").unlink()
    by_name = {name: param for param, name in names(11).items()}
    name = list(tensors)[index]
    with pytest.raises(CheckpointError, match=rf"tensor{index:05}_000: missing; it holds {by_name[name]} \({name}\)"):
        load(path)


def test_a_short_file_is_named_with_its_parameter(checkpoint, tmp_path):
    _, tensors = checkpoint
    path = write_grok1(tmp_path, tensors)
    file = path / "ckpt-0" / "tensor00003_000"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"tensor00003_000: .*truncated.* \(it should hold layer_0/moe/down/w, "):
        load(path)


@pytest.mark.parametrize("name", ["tensor00134_000", "tensor00000_001", "notes.txt"])
def test_a_surplus_file_is_named(checkpoint, tmp_path, name):
    _, tensors = checkpoint
    path = write_grok1(tmp_path, tensors)
    (path / "ckpt-0" / name).write_bytes(pickle_tensor(np.zeros(3, np.float32)))
    with pytest.raises(
        CheckpointError, match=rf"{name}: left over .* 134 parameters, the last of them layer_9/moe/router"
    ):
        load(path)


def test_what_a_download_leaves_behind_is_no_surplus(checkpoint, tmp_path):
    path = write_grok1(tmp_path, checkpoint[1])
    (path / "ckpt-0" / ".cache").mkdir()
    assert load(path).keys() == load(checkpoint[0]).keys()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "transformer/decoder_layer_0/router/w",
            np.zeros((8, 24), np.float32),
            r"tensor00013_000: tensor 'transformer/decoder_layer_0/router/w' has shape \[8, 24\]; the config asks for "
            r"\[24, 8\] \(layer_0/moe/router/w\)",
        ),
        ("language_model/rms_norm/scale", np.full(24, np.nan, np.float32), "rms_norm/scale' holds NaN"),
        ("language_model/rms_norm/scale", np.zeros(24, np.int8), "dtype int8; expected one of"),
        (
            "transformer/decoder_layer_1/multi_head_attention/key/w",
            QuantizedWeight8bit(np.zeros((24, 12), np.int8), np.full((1, 12), np.inf, ml_dtypes.bfloat16)),
            r"key/w\.scales' holds NaN or infinite values",
        ),
        (
            "transformer/decoder_layer_1/multi_head_attention/key/w",
            QuantizedWeight8bit(np.zeros((24, 12), np.int8), np.ones((5, 12), ml_dtypes.bfloat16)),
            r"scales of \[5, 12\]; expected the same shape with a divisor of 24",
        ),
        (
            "transformer/decoder_layer_1/multi_head_attention/key/w",
            QuantizedWeight8bit(np.zeros((24, 12), np.int8), np.ones(12, ml_dtypes.bfloat16)),
            r"scales of \[12\]; expected the same shape",
        ),
        (
            "transformer/decoder_layer_1/multi_head_attention/key/w",
            QuantizedWeight8bit(np.zeros((24, 12), np.int8), np.ones((1, 12), np.int8)),
            "dtype int8 with scales of int8; expected int8 with floats",
        ),
    ],
)
def test_a_wrong_tensor_is_named(checkpoint, tmp_path, name, tensor, message):
    path = write_grok1(tmp_path, checkpoint[1] | {name: tensor})
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_progress_counts_every_byte_once(checkpoint):
    path, tensors = checkpoint
    calls = []
    load(path, progress=lambda *call: calls.append(call))
    sizes = {
        name: t.weight.nbytes + t.scales.nbytes if isinstance(t, QuantizedWeight8bit) else t.nbytes
        for name, t in tensors.items()
    }
    assert sorted(call[2] for call in calls) == sorted(sizes)
    assert [call[0] for call in calls] == np.cumsum([sizes[name] for _, _, name in calls]).tolist()
    assert {call[1] for call in calls} == {sum(sizes.values())}


def test_files_are_read_by_several_threads_at_once(checkpoint, monkeypatch):
    path, _ = checkpoint
    # Passes only once three reads wait in it together.
    barrier = threading.Barrier(3, timeout=30)
    waited = threading.Semaphore(3)
    original = Grok1Source.read

    def read(self, name):
        if waited.acquire(blocking=False):
            barrier.wait()
        return original(self, name)

    monkeypatch.setattr(Grok1Source, "read", read)
    load(path, num_threads=3)
    assert not barrier.broken


def test_each_device_reads_its_part_only(checkpoint, monkeypatch):
    path, _ = checkpoint
    read = []

    class Recording(np.memmap):
        def __getitem__(self, index):
            part = super().__getitem__(index)
            read.append(part.shape)
            return part

    original = Grok1Source.read

    def mapped(self, name):
        array = original(self, name)
        return array.view(Recording) if name.endswith("moe/linear/w") else array

    monkeypatch.setattr(Grok1Source, "read", mapped)
    config, mesh = load_config(path), make_mesh(2, 4)
    load_params(path, config, int8_tree(config, 1, 8), lambda p, s: param_sharding(p, s, mesh), num_threads=1)
    # 32 of width over 4 devices, read once for the two rows of the mesh.
    assert read == [(8, 24, 8)] * 4 * 11


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_host_holds_one_tensor_for_each_thread(tmp_path, num_threads):
    # Tensors of 8 MiB, beside which what else Python holds is little.
    config = CONFIG | {"emb": 512, "widen": 6, "layers": 6}
    tensors = make_tensors(config=config)
    path = write_grok1(tmp_path, tensors, config)
    largest = max(t.weight.nbytes for t in tensors.values() if isinstance(t, QuantizedWeight8bit))
    total = sum(t.weight.nbytes for t in tensors.values() if isinstance(t, QuantizedWeight8bit))
    abstract = int8_tree(load_config(path), 1, 4)
    load(path, abstract, 2)  # compiles
    del tensors
    gc.collect()
    tracemalloc.start()
    try:
        load(path, abstract, 2, num_threads=num_threads)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total > 15 * largest
    assert peak < (num_threads + 0.7) * largest


@pytest.mark.slow
def test_int8_weights_give_the_logits_and_tokens_of_the_reference():
    path = reference_dir("grok1/tiny")
    references, config = load_references(path / "reference_f32.npz"), load_config(path)
    mesh = make_mesh(1, 8)
    decoder = Decoder(config, mesh, "int8", "float32")
    options = dataclasses.replace(engine_config(references, 1, "float32"), weight_dtype="int8")
    params = load_params(path, config, decoder.abstract_params(), lambda p, s: param_sharding(p, s, mesh))
    assert params["layer_1/moe/down"]["w"].dtype == jnp.int8
    comparisons = compare(build_engine(decoder, params, options), references)
    assert len(comparisons) == 3
    for comparison in comparisons:
        assert comparison.ok(1e-3), comparison
        assert comparison.num_agreeing == 24
