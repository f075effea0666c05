"""The import graph is the architecture."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MESSAGES = ("request", "plan")
"""What both sides of the engine know."""
POLICIES = ("admission", "page_pool", "scheduler", "sequence", "shard_cache", "step_builder", "waiting_queue")
HOST_SIDE = MESSAGES + POLICIES
ALLOWED = {"engine": {"engine"}, "cluster": {"cluster", "engine"}, "serve_app": {"serve_app", "cluster", "engine"}}
SERVING_LIBRARIES = {"ray", "fastapi", "pydantic", "starlette", "prometheus_client"}


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(package: str) -> list[tuple[str, str]]:
    """(file, module) of every import of a package."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"no source in {package}"
    return [(str(path.relative_to(ROOT)), module) for path in files for module in imported_modules(path)]


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_one_way(package):
    others = set(ALLOWED) - ALLOWED[package] | {"tests", "benchmarks"}
    assert [(f, m) for f, m in imports_of(package) if m.partition(".")[0] in others] == []


def test_engine_knows_nothing_of_serving_libraries():
    assert [(f, m) for f, m in imports_of("engine") if m.partition(".")[0] in SERVING_LIBRARIES] == []


def test_host_side_reaches_no_jax():
    seen: set[str] = set()
    waiting = [f"engine.{name}" for name in HOST_SIDE]
    while waiting:
        module = waiting.pop()
        path = ROOT / (module.replace(".", "/") + ".py")
        if module in seen or not path.exists():
            continue
        seen.add(module)
        imports = list(imported_modules(path))
        assert not [m for m in imports if m.partition(".")[0] in {"jax", "jaxlib", "haiku", "numpy"}], module
        waiting += [m for m in imports if m.startswith("engine.")]
    assert {f"engine.{name}" for name in HOST_SIDE} | {"engine.errors"} == seen


def test_device_side_never_sees_a_policy():
    # Both sides meet in the engine, and in what guesses tokens for requests, on a device or not.
    allowed = {"engine/engine.py", *(f"engine/{name}.py" for name in POLICIES)}
    policies = {f"engine.{name}" for name in POLICIES}
    assert {f for f, m in imports_of("engine") if ".".join(m.split(".")[:2]) in policies} <= allowed
