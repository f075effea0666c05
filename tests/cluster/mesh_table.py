"""The README's table of meshes over several machines, from the planner: `python -m tests.cluster.mesh_table`."""

import sys

import jax

from cluster.planner import Plan, PlanInput, make_plan
from cluster.roofline import Accelerator
from engine.config import EngineConfig, WeightDType
from engine.devices import provide_cpu_devices
from engine.weights.grok1 import release_config

GPUS_OF_A_MACHINE = 8
NUM_SLOTS = 32
H100 = Accelerator(80e9, 3350e9, 989e12)
# Machines along (data, model), the weights' type, and what this mesh is for.
MESHES: tuple[tuple[tuple[int, int], WeightDType, str], ...] = (
    ((1, 1), "int8", "the smallest that holds the model"),
    ((2, 1), "int8", "twice the requests of one replica; no token comes sooner"),
    ((1, 2), "int8", "each token in half the time, if the network between the machines keeps up"),
    ((1, 2), "bfloat16", "the model without int8 products"),
    ((4, 1), "int8", "four times the requests of one replica"),
    ((2, 2), "int8", "both: half the time, and twice the requests that 1 x 16 holds"),
    ((2, 2), "bfloat16", "the same without int8 products"),
)


def plan(machines: tuple[int, int], weight_dtype: WeightDType) -> Plan:
    """Grok-1 on so many machines along each axis, as `python -m cluster.plan grok-1 --no-compile` has it."""
    return make_plan(
        PlanInput(
            name="grok-1",
            model=release_config(),
            mesh=(machines[0], GPUS_OF_A_MACHINE * machines[1]),
            device=H100,
            memory_fraction=0.9,
            engine=EngineConfig(
                num_slots=NUM_SLOTS,
                prefill_buckets=(512,),
                weight_dtype=weight_dtype,
                activation_dtype="bfloat16",
            ),
        )
    )


def row(machines: tuple[int, int], weight_dtype: WeightDType, meaning: str) -> str:
    """A line of the table."""
    result = plan(machines, weight_dtype)
    memory, (data, model) = result.memory, result.input.mesh
    hosts = ", ".join(
        f"`hosts_along_{axis}: {n}`" for axis, n in zip(("data", "model"), machines, strict=True) if n > 1
    )
    cells = (
        str(data * model),
        f"{data} x {model}",
        hosts or "one machine",
        weight_dtype,
        f"{sum(memory.weights.values()) / 1e9:.1f} GB",
        str(memory.num_slots(result.context_len)),
        f"{1e3 * result.decode_step_s(1):.2f} ms",
        f"{1e3 * result.decode_step_s(NUM_SLOTS):.1f} ms",
        meaning,
    )
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """All of it; needs as many devices as the largest mesh."""
    header = (
        "GPUs",
        "mesh",
        "`mesh` beside `model: 8`",
        "weights",
        "of each GPU",
        "slots of 8192 tokens that fit",
        "least time of a token, 1 request",
        f"of a step, {NUM_SLOTS} requests",
        "what it buys",
    )
    lines = ["| " + " | ".join(header) + " |", "| ---: | --- | --- | --- | ---: | ---: | ---: | ---: | --- |"]
    return "\n".join(lines + [row(*mesh) for mesh in MESHES])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    provide_cpu_devices(GPUS_OF_A_MACHINE * max(data * model for (data, model), _, _ in MESHES))
    sys.stdout.write(table() + "\n")
