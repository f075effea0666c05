"""Where a replica runs: the platform its config asks for, or a refusal that says what was found.

jax falls back to the CPU where a GPU's libraries are missing or of the wrong version; here that is an error.
"""

import importlib.util
import os
from pathlib import Path
from typing import Literal

import jax

from engine.devices import provide_cpu_devices
from engine.errors import ConfigError

Platform = Literal["auto", "cpu", "gpu", "tpu"]

NVIDIA_DEVICE_FILE = Path("/dev/nvidia0")
"""There wherever the NVIDIA driver has found a GPU."""

_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def prepare_platform(
    platform: Platform,
    num_devices: int,
    memory_fraction: float,
    nvidia_device_file: Path = NVIDIA_DEVICE_FILE,
) -> None:
    """Chooses the platform, before jax's first use, and makes sure of it.

    `num_devices`: of this process; a CPU stands for as many. `memory_fraction`: the share of each accelerator's memory
    that jax takes, in (0, 1]. Raises `ConfigError`, saying what was found, where the platform is not there, and for
    "auto" where there is an NVIDIA GPU that jax cannot use.
    """
    choose_platform(platform, num_devices, memory_fraction)
    check_platform(platform, nvidia_device_file)


def choose_platform(platform: Platform, num_devices: int, memory_fraction: float) -> None:
    """The first half of `prepare_platform`: nothing is used yet, so hosts can be joined (`cluster.multihost`)."""
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory_fraction)
    if platform != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    if platform == "cpu":
        provide_cpu_devices(num_devices)


def check_platform(platform: Platform, nvidia_device_file: Path = NVIDIA_DEVICE_FILE) -> None:
    """The second half: uses the platform."""
    try:
        found = jax.devices()[0].platform
    except RuntimeError as error:
        raise ConfigError(f"mesh.platform is {platform!r}, and jax cannot use it: {error}. {_situation()}") from None
    if platform not in ("auto", found):
        raise ConfigError(f"mesh.platform is {platform!r}, and jax already runs on {found!r} in this process")
    if platform == "auto" and found == "cpu" and nvidia_device_file.exists():
        raise ConfigError(
            f"mesh.platform is 'auto' and there is an NVIDIA GPU ({nvidia_device_file}), but jax found only a CPU. "
            f"{_situation()} Install the cuda extra (make setup CUDA=1) and reserve GPUs (serving.replica_num_gpus), "
            "or set mesh.platform to cpu to run on the CPU"
        )


def _situation() -> str:
    """What decides whether jax finds a GPU."""
    plugins = [name for name in _CUDA_PLUGINS if importlib.util.find_spec(name) is not None]
    installed = f"jax {jax.__version__} with {' and '.join(plugins)}" if plugins else f"jax {jax.__version__}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limits = "CUDA_VISIBLE_DEVICES is not set" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
    return f"Installed: {installed}{'' if plugins else ' without a CUDA plugin'}; {limits}."
