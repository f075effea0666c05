import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.abstract_programs import (
    ProgramMemory,
    argument_bytes,
    compile_programs,
    cut,
    extrapolate,
    program_shapes,
)
from cluster.budget import abstract_params, cache_bytes_per_position, list_params, weight_bytes
from cluster.mesh import MeshConfig, build_mesh
from cluster.plan import main
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.packing import BatchShape
from engine.sizes import derive_sizes
from engine.weights.grok1 import release_config
from serve_app.config import load_file
from tests.engine.weights.grok1_checkpoints import CONFIG, write_grok1

from .test_budget import MODEL

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ["--mesh", "2x2", "--slots", "4", "--prefill-chunk", "16", "--device-memory-gb", "0.001"]


@pytest.fixture
def model(tmp_path):
    """A model of four layers without any weight."""
    return str(write_grok1(tmp_path, {}, CONFIG | {"layers": 4}))


def plan(capsys, *arguments):
    status = main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_compilers_arguments_are_those_of_the_arithmetic(capsys, model):
    """Depths 1 and 2 are compiled; what four layers take is on the line through both."""
    status, found = plan(capsys, model, *SMALL, "--weight-dtype", "int8", "--layers-compiled", "2")
    assert status == 0
    compiled = found["compiled"]
    assert (compiled["layers_compiled"], compiled["extrapolated"]) == ([1, 2], True)
    assert list(compiled["programs"]) == ["decode 2 rows", "prefill 16 tokens"]
    cache = 2 * 128 * found["bytes_per_device"]["cache_per_position"]
    for program in compiled["programs"].values():
        assert program["arguments"] == program["arguments_by_arithmetic"]
        assert program["arguments"] > sum(found["bytes_per_device"]["weights"].values()) + cache
        assert program["aliased"] == cache + 4 * 4
        assert program["temporaries"] > 0
        assert program["peak"] == (
            program["arguments"] + program["results"] - program["aliased"] + program["temporaries"]
        )


def test_nothing_is_allocated_and_all_layers_are_compiled_unless_told_otherwise(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.kv_cache.allocate", lambda *_: pytest.fail("a cache was allocated"))
    model = str(write_grok1(tmp_path, {}, CONFIG | {"layers": 1}))
    assert main([model, *SMALL]) == 0
    out = capsys.readouterr().out
    assert "all 1 layers compiled" in out
    assert "| decode 2 rows |" in out
    assert "weights, bfloat16" in out


def test_what_fits_decides_the_exit_status(capsys, model):
    status, found = plan(capsys, model, *SMALL, "--no-compile")
    assert (status, found["fits"], found["compiled"]) == (0, True, None)
    memory = found["bytes_per_device"]
    assert memory["usable"] == 900_000
    assert memory["cache_per_slot"] == 128 * memory["cache_per_position"] == 128 * 4 * 2 * 1 * 6 * 2
    slots = 2 * ((900_000 - sum(memory["weights"].values()) - memory["workspace_estimate"]) // memory["cache_per_slot"])
    assert found["num_slots_that_fit"] == slots
    # The workspace grows with the rows, so not quite as many fit as were left room for.
    status, found = plan(capsys, model, *SMALL, "--no-compile", "--slots", str(slots // 4 * 2))
    assert (status, found["largest_context"]) == (0, 64)
    status, found = plan(capsys, model, *SMALL, "--no-compile", "--slots", str(2 * slots))
    assert (status, found["fits"], found["largest_context"]) == (1, False, 0)
    assert main([model, *SMALL, "--no-compile", "--slots", str(2 * slots)]) == 1
    assert "DO NOT FIT" in capsys.readouterr().out


def test_times_follow_the_device(capsys, model):
    _, slow = plan(capsys, model, *SMALL, "--no-compile", "--bandwidth-gbs", "1", "--tflops", "1000")
    _, fast = plan(capsys, model, *SMALL, "--no-compile", "--bandwidth-gbs", "4", "--tflops", "1000")
    assert slow["roofline_s"] == pytest.approx({name: 4 * value for name, value in fast["roofline_s"].items()})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "1x3"], "model axis of 3 does not divide 4 query heads"),
        (["--slots", "3", "--mesh", "2x2"], "3 slots cannot be divided over a data axis of 2"),
        (["--mesh", "1x2", "--context", "65"], "max_model_len is 65; the model was trained for 64 positions"),
        (["--mesh", "1x2", "--prefill-chunk", "24"], "no multiples of the page size"),
    ],
)
def test_unusable_input_exits_with_2_and_says_why(capsys, model, arguments, message):
    assert main([model, "--no-compile", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--memory-fraction", "1.1"], ["--tflops", "0"], ["--layers-compiled", "1"], ["--mesh", "8"]]
)
def test_a_bad_argument_exits_with_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(["grok-1", *arguments])
    assert caught.value.code == 2


def test_a_model_that_is_not_there_exits_with_2(capsys):
    assert main(["no/such/model"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_arguments_are_weights_cache_last_tokens_and_the_batch():
    shape = BatchShape(num_shards=2, rows_per_shard=3, num_tokens=5, num_columns=8, num_slots=6)
    # A row: 10 integers, 8 pages, 3 floats, 5 tokens.
    assert argument_bytes(shape, 1000, 7, 16) == 1000 + 3 * 8 * 16 * 7 + 4 * (6 + 3 * (14 + 16 + 8 + 3 + 5))


def test_extrapolation_is_on_the_line_through_two_depths():
    shallow, deep = ProgramMemory(10, 5, 4, 100), ProgramMemory(16, 7, 6, 90)
    assert extrapolate(shallow, deep, (2, 4), 10) == ProgramMemory(34, 13, 12, 60)


def test_a_cut_model_keeps_the_windows_of_its_first_layers():
    assert cut(MODEL, 2) == replace(MODEL, num_layers=2)
    assert cut(replace(MODEL, layer_windows=(5, None, 7)), 2).layer_windows == (5, None)


def test_a_mesh_with_more_devices_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="1 x 9 = 9 devices"):
        build_mesh(MeshConfig((1, 9)))


@pytest.mark.slow
def test_the_programs_of_the_full_grok_1_compile():
    """As configs/grok1.yaml has them, at full width: decode with all 64 layers, which takes more than a minute where no
    compiled program is kept, and prefill, which would take as long again, with four of them."""
    config = load_file(CONFIGS / "grok1.yaml").application.args
    engine = config.engine.to_engine_config()
    mesh = build_mesh(MeshConfig((config.mesh.data, config.mesh.model)))

    def decoder(model):
        return Decoder(model, mesh, engine.weight_dtype, engine.activation_dtype, engine.expert_sharding)

    def check(model, kind):
        tree = abstract_params(decoder(model))
        params = list_params(tree)
        ((name, program),) = compile_programs(decoder(model), engine, tree, kinds=[kind]).items()
        position = cache_bytes_per_position(decoder(model), "bfloat16")
        assert position == model.num_layers * 2 * 1 * 128 * 2
        cache = engine.num_slots * 8192 * position
        assert program.aliased == cache + 4 * engine.num_slots
        shape = program_shapes(derive_sizes(engine, decoder(model)))[name]
        assert program.arguments == argument_bytes(shape, sum(weight_bytes(params).values()), position, 16)
        return params

    params = check(release_config(), "decode")
    # 8 experts of 3 x 6144 x 32768, attention of 6144 x (2 x 6144 + 2 x 1024), a router of 8 x 6144, four norms.
    layer = 8 * 3 * 6144 * 32768 + 6144 * (2 * 6144 + 2 * 1024) + 8 * 6144 + 4 * 6144
    assert sum(p.size for p in params if not p.is_quantization_scale) == 64 * layer + 131072 * 6144 + 6144
    check(cut(release_config(), 4), "prefill")
