"""A runner whose steps are one sum over all devices of all hosts: quick to compile, and as easy to hang as a model."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cluster.mesh import MeshConfig, build_mesh
from engine.devices import put
from engine.plan import SampledToken, StepPlan, StepResult


class CollectiveRunner:
    """Samples (position times number of devices)."""

    def __init__(self) -> None:
        mesh = build_mesh(MeshConfig((1, jax.local_device_count()), (1, jax.process_count())))
        self._by_device = NamedSharding(mesh, PartitionSpec("model"))
        self._sum = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self.decoder = SimpleNamespace(config="a sum", attention_kernel="reference", mesh=mesh)
        self.sizes: tuple[int, ...] = ()
        self.params: dict[str, dict[str, jax.Array]] = {}
        self.compiled_programs: dict[str, object] = {}
        self.num_compilations_since_warm_up = 0

    def warm_up(self, progress: object = None) -> dict[str, float]:
        """Compiles the sum."""
        self._run(0)
        return {}

    def dispatch(self, plan: StepPlan) -> int:
        """Runs it: on a CPU a step with collectives is waited for."""
        return self._run(plan.decode[0].position)

    def fetch(self, handle: int) -> StepResult:
        """The sum as a token."""
        return StepResult((), ((SampledToken(handle, None),),))

    def _run(self, value: int) -> int:
        host = np.full(jax.device_count(), value, np.int32)
        return int(self._sum(put(host, self._by_device)))
