"""Set before any test touches a device: eight virtual CPU devices, so that every mesh can be tested anywhere."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
