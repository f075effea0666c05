"""The command that prints how parameters lie on a mesh."""

from pathlib import Path

import pytest

from engine.models.decoder import Decoder
from engine.sharding import PARAM_RULES, make_mesh
from engine.sharding_table import main, parameter_table, render

from .tiny_models import WIDE


def test_every_parameter_is_listed_with_its_rule_and_its_part_of_a_device() -> None:
    decoder = Decoder(WIDE, make_mesh(1, 8), "float32", "float32")
    header, *rows = parameter_table(decoder)
    assert len(rows) == sum(len(arrays) for arrays in decoder.abstract_params().values())
    by_path = {row[0]: row[1:] for row in rows}
    pattern, spec = r"layer_\d+/ffn/(gate|up)/(w|scale)", "P('model', None)"
    assert by_path["layer_1/ffn/up/w"] == (pattern, spec, "[40, 22]", "[5, 22]")
    assert header == ("parameter", "rule", "partition", "shape", "on each device")


def test_columns_are_aligned() -> None:
    assert render([("a", "bbb", "c"), ("long", "b", "c")]) == "a     bbb  c\nlong  b    c\n"


def test_without_a_model_the_rules_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(pattern in printed for pattern, _ in PARAM_RULES)
    assert "P(None, 'model', None)" in printed
    assert main(["--expert-sharding", "expert"]) == 0
    assert "P('model', None, None)" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
