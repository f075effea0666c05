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


def test_long_phases_show_their_first_and_last_state_and_not_every_one_between(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = StartUpLines()
    for done in range(101):
        lines.programs(done, 100, f"p{done}")
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "programs compiling: 0 of 100 done, now p0"
    assert out[-1] == "100 compiled"
    assert len(out) < 50
