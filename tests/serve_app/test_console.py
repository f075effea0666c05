"""The lines an operator reads while a server starts."""

import pytest

from engine.errors import ConfigError
from serve_app.console import StartUpLines, told_on_failure


def test_a_failed_start_says_why_and_is_raised(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError), told_on_failure("a replica"):
        raise ConfigError("mesh.data is 3")
    assert capfd.readouterr().out == "a replica cannot start: mesh.data is 3\n"


def test_an_unexpected_failure_comes_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), told_on_failure("a replica"):
        raise KeyError("lost")
    out = capfd.readouterr().out
    assert "a replica cannot start: KeyError: 'lost'" in out
    assert "Traceback" in out


def test_long_phases_show_how_far_they_are_but_not_every_step(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = StartUpLines()
    for done in range(101):
        lines.weights(done * 10**7, 10**9, f"w{done}")
    out = capfd.readouterr().out.splitlines()
    assert out[-1] == "weights loading: 100 % of 1.00 GB (w100)"
    assert len(out) < 50
    StartUpLines().programs(0, 7, "decode 1 rows")
    assert capfd.readouterr().out == "programs compiling: 0 of 7 done, now decode 1 rows\n"
