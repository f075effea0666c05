import json
import re
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.compare import main as compare_main
from engine.errors import CheckpointError
from engine.models.decoder import Decoder
from engine.sharding import make_mesh, param_sharding
from engine.weights import convert as convert_module
from engine.weights import destination as destination_module
from engine.weights.convert import convert, main
from engine.weights.load import load_config, load_params
from engine.weights.native import verify_checksums

from .checkpoints import (
    LLAMA_CONFIG,
    MIXTRAL_CONFIG,
    llama_tensors,
    mixtral_tensors,
    reference_dir,
    write_checkpoint,
)
from .gguf_builder import llama_metadata, write_gguf
from .gguf_builder import llama_tensors as gguf_tensors
from .grok1_checkpoints import CONFIG as GROK1_CONFIG
from .grok1_checkpoints import make_tensors, write_grok1
from .torch_builder import write_state_dict

SHARD_BYTES = 3000
"""Makes several files of the tiny models."""


def llama(directory, dtype=np.float32):
    return write_checkpoint(directory, LLAMA_CONFIG, {k: t.astype(dtype) for k, t in llama_tensors().items()})


def grok1(directory):
    # Eight groups, as declared for the release.
    return write_grok1(directory, make_tensors(config=GROK1_CONFIG | {"layers": 2}), GROK1_CONFIG | {"layers": 2})


SOURCES = {
    "llama": llama,
    "mixtral": lambda directory: write_checkpoint(directory, MIXTRAL_CONFIG, mixtral_tensors()),
    "gguf": lambda directory: write_gguf(directory / "model.gguf", llama_metadata(), gguf_tensors()),
    "grok1": grok1,
}


def load(path, weight_dtype="float32", model=1, **options):
    config, mesh = load_config(path), make_mesh(1, model)
    abstract = Decoder(config, mesh, weight_dtype, "float32").abstract_params()
    params = load_params(path, config, abstract, lambda p, s: param_sharding(p, s, mesh), **options)
    return {f"{module}/{name}": array for module, rest in params.items() for name, array in rest.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].dtype == array.dtype
        np.testing.assert_array_equal(found[path], array, err_msg=path)


@pytest.fixture
def source(tmp_path):
    return llama(tmp_path / "source")


@pytest.fixture
def destination(tmp_path):
    return tmp_path / "converted"


@pytest.mark.parametrize("name", SOURCES)
def test_a_converted_model_is_the_same_model(tmp_path, destination, name):
    (tmp_path / "source").mkdir()
    source = SOURCES[name](tmp_path / "source")
    convert(source, destination, shard_bytes=SHARD_BYTES, verify=True)
    assert len(list(destination.glob("model-*.safetensors"))) > 2
    assert load_config(destination) == load_config(source)
    assert_same(load(destination), load(source))
    assert_same(load(destination, model=2), load(source, model=2))


def test_int8_stays_int8(tmp_path, destination):
    source = grok1(tmp_path / "source")
    convert(source, destination, shard_bytes=SHARD_BYTES)
    errors = []
    assert_same(load(destination, "int8", report=errors.append), load(source, "int8"))
    assert errors == []


def test_the_types_of_the_source_stay(tmp_path, destination):
    source = llama(tmp_path / "source", ml_dtypes.bfloat16)
    convert(source, destination)
    tensors = load_file(destination / "model-00001-of-00001.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    np.testing.assert_array_equal(tensors["layer_1/ffn/up/w"], load(source)["layer_1/ffn/up/w"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_another_type(source, destination, dtype):
    convert(source, destination, dtype)
    tensors = load_file(destination / "model-00001-of-00001.safetensors")
    for path, array in load(source).items():
        expected = jnp.float32 if "norm/" in path else jnp.dtype(dtype)
        np.testing.assert_array_equal(tensors[path], np.asarray(array).astype(expected))


def test_int8_of_a_float_model_is_what_loading_would_make(source, destination):
    lines, errors = [], []
    convert(source, destination, "int8", say=lines.append)
    assert any("21 parameters quantised to int8: relative RMS error" in line for line in lines)
    assert_same(load(destination, "int8", report=errors.append), load(source, "int8"))
    assert errors == []
    widened, exact = load(destination), load(source)
    for path, array in exact.items():
        np.testing.assert_allclose(widened[path], array, rtol=0, atol=float(jnp.max(jnp.abs(array))) / 250)


def test_the_tokenizer_comes_along(source, destination):
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    (source / "training_args.bin").write_text("x")
    convert(source, destination)
    assert (destination / "tokenizer.json").read_text() == "{}"
    assert (destination / "chat_template.jinja").read_text() == "x"
    assert not (destination / "training_args.bin").exists()


class Interrupted(Exception):
    pass


def interrupt_after(monkeypatch, num_files):
    original, calls = destination_module.save_file, []

    def save_file(tensors, path):
        if len(calls) == num_files:
            path.write_bytes(b"half a file")
            raise Interrupted
        calls.append(path.name)
        original(tensors, path)

    monkeypatch.setattr(destination_module, "save_file", save_file)
    return calls


def test_an_interrupted_conversion_goes_on_where_it_stopped(source, destination, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        with pytest.raises(Interrupted):
            convert(source, destination, shard_bytes=SHARD_BYTES)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load_config(destination)
    written = interrupt_after(monkeypatch, 100)
    lines = []
    convert(source, destination, shard_bytes=SHARD_BYTES, verify=True, say=lines.append)
    assert [line.split()[0][:11] for line in lines if "there already" in line] == ["model-00001", "model-00002"]
    assert written[0].startswith("model-00003")
    assert_same(load(destination), load(source))
    assert not list(destination.glob("*.partial"))


def test_a_file_damaged_since_is_written_again(source, destination, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(Interrupted):
            convert(source, destination, shard_bytes=SHARD_BYTES)
    second = next(destination.glob("model-00002*"))
    flip_last_byte(second)
    written = interrupt_after(monkeypatch, 100)
    convert(source, destination, shard_bytes=SHARD_BYTES)
    assert [name[:11] for name in written[:2]] == ["model-00002", "model-00004"]
    assert_same(load(destination), load(source))


def flip_last_byte(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_finished_conversion_is_not_written_again(source, destination):
    convert(source, destination)
    before = {file.name: file.stat().st_mtime_ns for file in destination.iterdir()}
    with pytest.raises(CheckpointError, match="converted: this conversion is finished, and is not written again"):
        convert(source, destination)
    convert(source, destination, verify=True)
    assert {file.name: file.stat().st_mtime_ns for file in destination.iterdir()} == before


def test_a_destination_with_anything_else_in_it_is_refused(source, destination):
    destination.mkdir()
    (destination / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"converted: holds 'thesis\.txt' and is no conversion"):
        convert(source, destination)
    assert [file.name for file in destination.iterdir()] == ["thesis.txt"]
    with pytest.raises(CheckpointError, match=r"source: holds 'config\.json' and is no conversion"):
        convert(source, source)


def test_a_destination_that_is_a_file_is_refused(source, destination):
    destination.write_text("mine")
    with pytest.raises(CheckpointError, match="converted: not a folder"):
        convert(source, destination)


@pytest.mark.parametrize("change", ["source", "dtype", "shard_bytes"])
def test_a_conversion_of_something_else_is_refused(tmp_path, source, destination, change):
    convert(source, destination)
    options = {"dtype": "bfloat16"} if change == "dtype" else {"shard_bytes": 10} if change == "shard_bytes" else {}
    if change == "source":
        source = llama(tmp_path / "other", np.float16)
    with pytest.raises(CheckpointError, match="a conversion of another source, of a source that has changed, or with"):
        convert(source, destination, **options)


def test_a_full_disk_is_noticed_before(source, destination, monkeypatch):
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match="needs 17880 bytes more; 1000 are free on its disk"):
        convert(source, destination)


def test_a_write_that_went_wrong_is_noticed(source, destination, monkeypatch):
    original = destination_module.save_file

    def save_file(tensors, path):
        original(tensors, path)
        flip_last_byte(path)

    monkeypatch.setattr(destination_module, "save_file", save_file)
    with pytest.raises(CheckpointError, match="reads back other than it was written; check the disk"):
        convert(source, destination)


def test_verify_finds_one_wrong_bit(source, destination):
    convert(source, destination, shard_bytes=SHARD_BYTES)
    verify_checksums(destination)
    file = next(destination.glob("model-00003*"))
    flip_last_byte(file)
    with pytest.raises(CheckpointError, match=rf"{file.name}: differs from its checksum"):
        convert(source, destination, shard_bytes=SHARD_BYTES, verify=True)


def test_a_missing_or_truncated_file_is_named_at_loading(source, destination):
    convert(source, destination, shard_bytes=SHARD_BYTES)
    file = next(destination.glob("model-00002*"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"{file.name}: has {len(whole) - 1} bytes; .* says {len(whole)}"):
        load(destination)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{file.name}: is missing"):
        load(destination)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config | {"format_version": 2}, "format_version is 2; this version reads 1"),
        (lambda config: config | {"config": None}, "ModelConfig is None; expected an object"),
        (lambda config: config | {"config": config["config"] | {"num_layers": 4}}, "layer_3.* knows no tensor|missing"),
        (lambda config: config | {"config": config["config"] | {"num_layers": 2}}, "left over"),
        (
            lambda config: config | {"config": config["config"] | {"num_layers": 0}},
            "num_layers is 0; expected a positive",
        ),
    ],
)
def test_a_config_that_is_wrong_is_refused(source, destination, change, message):
    convert(source, destination)
    file = destination / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(CheckpointError, match=message):
        load(destination)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sums: sums["files"].clear(), "is listed in only one of checksums"),
        (
            lambda sums: sums["files"].update({"../x": {"num_bytes": 1, "sha256": ""}}),
            r"'\.\./x' is not the plain name",
        ),
        (lambda sums: sums.pop("origin"), "expected 'origin' and 'files'"),
        (lambda sums: next(iter(sums["files"].values())).pop("sha256"), "sha256 is missing"),
    ],
)
def test_checksums_that_are_wrong_are_refused(source, destination, change, message):
    convert(source, destination)
    file = destination / "checksums.json"
    sums = json.loads(file.read_text())
    change(sums)
    file.write_text(json.dumps(sums))
    with pytest.raises(CheckpointError, match=message):
        load(destination)


def test_the_command(source, destination, capsys):
    assert main([str(source), str(destination), "--verify"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "model-00001-of-00001.safetensors written (17880 of 17880 bytes)"
    assert said[-1] == f"{destination} is complete"
    assert main([str(source), str(destination)]) == 2
    assert "this conversion is finished" in capsys.readouterr().err
    assert main([str(source / "absent"), str(destination)]) == 2
    assert "no such file or directory" in capsys.readouterr().err


def test_a_state_dict_is_converted_with_its_folders_tokenizer(tmp_path, destination):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (source / "tokenizer.json").write_text("{}")
    file = write_state_dict(source / "pytorch_model.bin", llama_tensors())
    convert(file, destination, shard_bytes=SHARD_BYTES, verify=True)
    assert (destination / "tokenizer.json").read_text() == "{}"
    assert_same(load(destination), load(llama(tmp_path / "safetensors")))


@pytest.mark.parametrize("prefix", ["window_", "full_"])
def test_a_converted_pi05_computes_what_pytorch_did(destination, capsys, prefix):
    folder = reference_dir("hf/pi05-tiny")
    assert main([str(folder / "pytorch_model.bin"), str(destination), "--verify"]) == 0
    window = ["--window", "full"] if prefix == "full_" else []
    assert compare_main([str(destination), str(folder / "reference.npz"), "--prefix", prefix, *window]) == 0


def test_the_table_names_every_parameter_with_its_tensor(tmp_path, capsys):
    folder = reference_dir("hf/pi05-tiny")
    assert main([str(folder), "--table", "--dtype", "bfloat16"]) == 0
    rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["SOURCE", "TARGET", "SHAPE", "TRANSPOSE", "DTYPE", "OPTIONAL"]
    by_target = {row[1]: row for row in rows[1:]}
    assert by_target.keys() == load(folder).keys()
    name = "model.layers.{}.self_attn.q_proj.{}"
    expected = [
        [name.format(0, "bias"), "layer_0/attention/q/b", "64", "no", "float32 -> bfloat16", "yes"],
        [name.format(1, "bias"), "layer_1/attention/q/b", "64", "no", "absent -> bfloat16", "yes"],
        [name.format(1, "weight"), "layer_1/attention/q/w", "64 x 64", "no", "float32 -> bfloat16", "no"],
        ["model.norm.bias", "final_norm/bias", "64", "no", "float32", "no"],
    ]
    for row in expected:
        assert by_target[row[1]] == row
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "dtype", "row"),
    [
        (
            "grok1",
            "keep",
            "transformer/decoder_layer_1/moe/linear_1/w  layer_1/moe/down/w yes int8 with scales",
        ),
        (
            "mixtral",
            "int8",
            "model.layers.0.block_sparse_moe.experts.{expert}.w2.weight layer_0/moe/down/w no float32 -> int8",
        ),
        ("gguf", "keep", "blk.0.attn_q.weight layer_0/attention/q/w"),
    ],
)
def test_tables_of_other_sources(tmp_path, name, dtype, row):
    (tmp_path / "source").mkdir()
    found = convert_module.table(SOURCES[name](tmp_path / "source"), dtype)
    (line,) = [line for line in found.splitlines() if row.split()[1] in line.split()]
    shapeless = re.sub(r"\d+( x \d+)+", "", line)
    assert " ".join(shapeless.split()).startswith(" ".join(row.split()))


@pytest.mark.parametrize("arguments", [[], ["there", "--table"], ["--table", "--verify"]])
def test_a_table_has_no_destination_and_a_conversion_one(source, capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(source), *arguments])
    assert caught.value.code == 2
    assert "expected a DESTINATION, or --table without one" in capsys.readouterr().err


def test_a_tensor_of_another_kind_is_refused_naming_both_sides(tmp_path, destination):
    tensors = llama_tensors() | {"model.norm.weight": np.ones(10, np.int32)}
    with pytest.raises(
        CheckpointError, match=r"tensor 'model\.norm\.weight' has dtype int32; expected one of .* \(final_norm/scale\)"
    ):
        convert(write_checkpoint(tmp_path / "source", LLAMA_CONFIG, tensors), destination)


def test_shards_hold_their_size():
    config = load_config(reference_dir("hf/llama-tiny"))
    source, weights = convert_module.open_source(reference_dir("hf/llama-tiny"), config)
    plans = convert_module._plans(source, weights, config, "float32")
    source.close()
    limit = 60_000
    shards = list(convert_module._shards(plans, limit))
    assert [plan for shard in shards for plan in shard] == plans
    for shard in shards:
        size = sum(convert_module._num_bytes(plan) for plan in shard)
        assert size <= limit or len(shard) == 1
