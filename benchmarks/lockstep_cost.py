"""What it costs to spread a replica over processes: the same decode steps on one process, and in lockstep over several.

A small model with random weights on virtual CPU devices, so that the step itself is short. What a step takes longer has
two parts: collectives between processes, in `untold_step_ms` (the same programs in the same processes, each of which
goes its own way through the same plans), and lockstep itself, `lockstep_ms` more: telling the followers and comparing
digests. `protocol_ms` is that with a runner that computes nothing.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from statistics import median
from types import SimpleNamespace
from typing import Any

import jax

from benchmarks.figures import progress
from cluster.group import Timeouts
from cluster.lockstep import LockstepRunner, follow
from cluster.mesh import MeshConfig, build_mesh
from cluster.messages import Step, encode
from cluster.multihost import Gathering, Invitation, join, leave
from engine.config import EngineConfig, ModelConfig
from engine.models.decoder import Decoder
from engine.plan import PlanRow, SampledToken, StepPlan, StepResult
from engine.request import SamplingParams
from engine.runner import StepRunner
from engine.sharding import param_sharding

MODEL = ModelConfig(
    family="llama",
    vocab_size=512,
    hidden_size=128,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_size=16,
    intermediate_size=256,
    max_position_embeddings=256,
)
NUM_SLOTS = 8
_WARM_UP_STEPS = 20


class Kind(StrEnum):
    """What the processes of a measurement do."""

    LOCKSTEP = "lockstep"
    """The leader tells the others each step."""
    UNTOLD = "untold"
    """Each goes through the same steps by itself."""
    PROTOCOL = "protocol"
    """The leader tells the others each step, and nobody computes."""


class NullRunner:
    """Computes nothing, at once."""

    def __init__(self) -> None:
        mesh = SimpleNamespace(shape={}, devices=SimpleNamespace(flat=[]))
        self.decoder = SimpleNamespace(config=None, attention_kernel="reference", mesh=mesh)
        self.sizes, self.params, self.compiled_programs = (), dict[str, Any](), dict[str, Any]()
        self.num_compilations_since_warm_up = 0

    def warm_up(self, progress: object = None) -> dict[str, float]:
        """Nothing."""
        return {}

    def dispatch(self, plan: StepPlan) -> StepPlan:
        """The plan."""
        return plan

    def fetch(self, plan: StepPlan) -> StepResult:
        """A token for each row."""
        return StepResult((), tuple((SampledToken(0, None),) for _ in plan.decode))


def make_runner(num_hosts: int, num_devices: int) -> StepRunner:
    """The model over the devices of all processes, along the model axis."""
    mesh = build_mesh(MeshConfig((1, num_devices // num_hosts), (1, num_hosts)))
    decoder = Decoder(MODEL, mesh, "float32", "float32")
    shardings = {
        module: {name: param_sharding(f"{module}/{name}", a.shape, mesh) for name, a in arrays.items()}
        for module, arrays in decoder.abstract_params().items()
    }
    params = jax.jit(decoder.init_params, out_shardings=shardings)(jax.random.key(0))
    config = EngineConfig(num_slots=NUM_SLOTS, max_model_len=128, prefill_buckets=(16,), batch_invariant=True)
    return StepRunner(decoder, params, config)


def decode_plan(position: int) -> StepPlan:
    """A decode step of every slot."""
    params = SamplingParams(temperature=0.0)
    pages = tuple(range(8))
    rows = (PlanRow(slot, slot, position, 1, (), pages, params, True) for slot in range(NUM_SLOTS))
    return StepPlan((), 0, tuple(rows), NUM_SLOTS)


def step_ms(execute: Callable[[StepPlan], object], num_steps: int) -> float:
    """The median step, in milliseconds."""
    times = []
    for number in range(_WARM_UP_STEPS + num_steps):
        plan = decode_plan(number % 100)
        start = time.perf_counter()
        execute(plan)
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[_WARM_UP_STEPS:])


def run_host(task: dict[str, Any]) -> None:
    """One process of a measurement: alone, the leader, or a follower."""
    num_hosts, num_devices, num_steps = task["num_hosts"], task["num_devices"], task["num_steps"]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices // num_hosts)

    def runner() -> Any:
        return NullRunner() if task["kind"] == Kind.PROTOCOL else make_runner(num_hosts, num_devices)

    def step_alone() -> float:
        alone = runner()
        alone.warm_up()
        return step_ms(alone.execute, num_steps)

    if "invitation" in task:
        with join(Invitation.from_json(task["invitation"])) as member:
            if task["kind"] == Kind.UNTOLD:
                step_alone()
                assert not list(member.commands())
            else:
                follow(runner(), member)
        leave()
    elif num_hosts == 1:
        _say(step_ms=step_alone())
    else:
        with Gathering(num_hosts, timeouts=Timeouts(start_s=120.0)) as gathering:
            _say(invitations=[gathering.invitation(rank).to_json() for rank in range(1, num_hosts)])
            leader = gathering.start()
            if task["kind"] == Kind.UNTOLD:
                _say(step_ms=step_alone())
            else:
                lockstep = LockstepRunner(runner(), leader)
                lockstep.warm_up()
                _say(step_ms=step_ms(lockstep.execute, num_steps))
            leader.stop()
        leave()


def measure(num_hosts: int, num_devices: int, num_steps: int, kind: Kind = Kind.LOCKSTEP) -> float:
    """The median step of a replica in processes of its own, in milliseconds."""
    task = {"num_hosts": num_hosts, "num_devices": num_devices, "num_steps": num_steps, "kind": kind}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_host(task))
        answer = _next_line(first)
        for invitation in answer.get("invitations", []):
            stack.enter_context(_host({**task, "invitation": invitation}))
        while "step_ms" not in answer:
            answer = _next_line(first)
        return float(answer["step_ms"])


@contextlib.contextmanager
def _host(task: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.lockstep_cost"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        try:
            yield process
            process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()


def _next_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):  # gloo writes lines of its own
            values: dict[str, Any] = json.loads(line)
            return values
    raise RuntimeError("a process of the replica has ended; see above")


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def figures(num_hosts: Sequence[int], num_devices: int, num_steps: int) -> Iterator[dict[str, object]]:
    """What each number of processes costs, over one process with as many devices."""
    progress("lockstep: one process ...")
    alone_ms = measure(1, num_devices, num_steps)
    for hosts in num_hosts:
        progress(f"lockstep: {hosts} processes ...")
        replica_ms = measure(hosts, num_devices, num_steps)
        untold_ms = measure(hosts, num_devices, num_steps, Kind.UNTOLD)
        yield {
            "num_hosts": hosts,
            "num_devices": num_devices,
            "one_process_step_ms": alone_ms,
            "replica_step_ms": replica_ms,
            "added_ms": replica_ms - alone_ms,
            "untold_step_ms": untold_ms,
            "lockstep_ms": replica_ms - untold_ms,
            "protocol_ms": measure(hosts, num_devices, num_steps, Kind.PROTOCOL),
            "command_bytes": len(encode(Step(1, decode_plan(1)))),
            "load_average": os.getloadavg()[0],
        }


if __name__ == "__main__":
    run_host(json.loads(sys.stdin.readline()))
