"""Virtual CPU devices, so that every mesh can be tried without the machine it is meant for."""

import os

import jax

from engine.errors import ConfigError


def provide_cpu_devices(num_devices: int) -> None:
    """Lets the CPU stand for at least `num_devices` devices; nothing where it does already, or where XLA_FLAGS decides.

    Raises `ConfigError` where jax has been used with fewer before.
    """
    forced = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if forced or max(1, jax.config.jax_num_cpu_devices) >= num_devices:  # type: ignore[attr-defined]
        return
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        raise ConfigError(f"the CPU cannot stand for {num_devices} devices any more: {error}") from None
