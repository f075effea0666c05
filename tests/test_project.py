"""The project's own files agree with each other."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from serve_app.config import load_file

ROOT = Path(__file__).parents[1]
LOCKS = ["requirements.lock", "requirements-cuda.lock", "requirements-model.lock"]

_ENTRY = re.compile(
    r"(?P<name>[a-z0-9._-]+)==(?P<version>\S+)(?: ; (?P<marker>.+?))?(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})+)"
)


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _entries(lock: str) -> list[re.Match[str]]:
    """The requirements of a lock file; a line of any other kind fails."""
    lines = [line for line in _read(lock).splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r" *\\\n +", " ", "\n".join(lines)).splitlines()
    matches = [(line, _ENTRY.fullmatch(line)) for line in joined if line.strip()]
    assert [line for line, match in matches if match is None] == []
    return [match for _, match in matches if match is not None]


def _versions(lock: str) -> dict[str, set[tuple[str, str | None]]]:
    found: dict[str, set[tuple[str, str | None]]] = {}
    for entry in _entries(lock):
        found.setdefault(canonicalize_name(entry["name"]), set()).add((entry["version"], entry["marker"]))
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_holds_pinned_hashed_requirements_and_no_index(lock: str) -> None:
    assert _entries(lock)
    assert "://" not in _read(lock)
    assert "--index" not in _read(lock)
    assert "--find-links" not in _read(lock)


@pytest.mark.parametrize(
    ("lock", "extras"), [("requirements.lock", ["dev"]), ("requirements-cuda.lock", ["dev", "cuda"])]
)
def test_every_dependency_is_locked_in_a_version_that_it_allows(lock: str, extras: list[str]) -> None:
    project = tomllib.loads(_read("pyproject.toml"))["project"]
    declared = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    locked = _versions(lock)
    for requirement in map(Requirement, declared):
        versions = locked.get(canonicalize_name(requirement.name), set())
        assert versions, f"{requirement.name} is not in {lock}; run `make lock`"
        assert [v for v, _ in versions if Version(v) not in requirement.specifier] == [], requirement.name


def test_cuda_lock_agrees_with_the_other() -> None:
    base, cuda = _versions("requirements.lock"), _versions("requirements-cuda.lock")
    assert {name: versions for name, versions in base.items() if cuda.get(name) != versions} == {}
    assert any(name.startswith("jax-cuda") for name in cuda.keys() - base.keys())


def test_makefile_has_the_documented_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", _read("Makefile"), re.MULTILINE))
    assert {"setup", "serve", "test", "lint", "format", "docs", "lock", "bench"} <= targets


def test_ci_runs_the_same_command_as_a_person() -> None:
    commands = [line for line in _read(".ci/run").splitlines() if line and not line.startswith("#")]
    assert commands[-1] == "exec make test"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_changelog_has_an_unreleased_section() -> None:
    assert "\n## [Unreleased]\n" in _read("CHANGELOG.md")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_config_loads(path: Path) -> None:
    assert load_file(path).application.args.model.source


def test_no_tracked_file_holds_a_path_of_a_machine() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Taken apart, so that this file does not hold them.
    pattern = re.compile(r"(?<![\w.])/(?:" + "|".join(["home", "root", "work", "Users"]) + r")/\w")
    files = [ROOT / name for name in listed.split("\0") if name]
    found = [
        str(file.relative_to(ROOT))
        for file in files
        if file.is_file() and pattern.search(file.read_bytes().decode("utf-8", "ignore"))
    ]
    assert found == []
