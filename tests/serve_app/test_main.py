"""The command line, as far as it goes without starting anything."""

from pathlib import Path

import pytest
import yaml

from serve_app.__main__ import main


def config_file(tmp_path: Path, sections: dict[str, object] | None = None, **model: object) -> Path:
    """A config file with that `model` section, and those others."""
    application = {"import_path": "serve_app.app:build", "args": {"model": model, **(sections or {})}}
    path = tmp_path / "app.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


def test_a_wrong_field_ends_with_status_2_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config_file(tmp_path, source="x", sorce="y"))]) == 2
    assert 'sorce: unknown field; did you mean "source"?' in capsys.readouterr().err


def test_a_model_that_is_not_there_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(config_file(tmp_path, source="no/such/model"))]) == 2
    assert "no/such/model" in capsys.readouterr().err


def test_a_draft_model_that_is_not_there_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections: dict[str, object] = {"engine": {"num_draft_tokens": 2}}
    path = config_file(tmp_path, sections, source=str(tmp_path), draft_source="no/such/draft")
    assert main(["--check", str(path)]) == 2
    assert "no/such/draft" in capsys.readouterr().err


def test_a_key_that_is_not_there_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, object] = {"auth": {"keys": [{"name": "alice", "key": "env:ALICE_KEY"}]}}
    path = config_file(tmp_path, sections, source=str(tmp_path))
    monkeypatch.delenv("ALICE_KEY", raising=False)
    assert main(["--check", str(path)]) == 2
    assert "the key 'alice' is in the variable ALICE_KEY, which is not set or empty" in capsys.readouterr().err
    monkeypatch.setenv("ALICE_KEY", "sk-alice")
    assert main(["--check", str(path)]) == 0


def test_check_looks_at_the_file_the_model_and_the_keys_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(config_file(tmp_path, source=str(tmp_path)))]) == 0
    assert "is in order" in capfd.readouterr().out
