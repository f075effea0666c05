"""Set before any test touches a device: eight virtual CPU devices, so that every mesh can be tested anywhere."""

import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).parents[1]
CHECKED = (
    "engine.attention",
    "engine.forward",
    "engine.kernels",
    "engine.kv_cache",
    "engine.models",
    "engine.packing",
    "engine.sampling",
    "engine.sharding",
)

jax.config.update("jax_num_cpu_devices", 8)
# Compiling is most of what the tests do; what a program is decides whether a kept one is used.
# It lies outside the checkout, so that a fresh clone on the same machine has it, too.
_CACHE_HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
jax.config.update("jax_compilation_cache_dir", str(_CACHE_HOME / "jax-serve" / "test-programs"))
# A bounded cache is a locked one, which several test processes can share.
jax.config.update("jax_compilation_cache_max_size", 4 << 30)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# The shapes and dtypes in the signatures of the device side are checked on every call.
install_import_hook(CHECKED, "beartype.beartype")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test` runs the tests marked `alone` after the others. An option, so that -m stays the caller's."""
    parser.addoption("--alone", choices=("none", "only"), help="without the tests marked `alone`, or only those")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what `--alone` says."""
    which = config.getoption("--alone")
    if which is None:
        return
    kept = [item for item in items if (item.get_closest_marker("alone") is not None) == (which == "only")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
