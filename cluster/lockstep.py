"""One program on many hosts: the leader sends each command to the followers before it carries it out itself.

    engine = Engine(LockstepRunner(StepRunner(...), leader), config)      # on the leader
    follow(StepRunner(...), member)                                       # on each follower, until the leader stops

Every host keeps a running digest over all commands and results. Followers send theirs after each command, and the
leader compares; it waits for none of that in a step, and hears of a follower that differs within the next.
"""

import hashlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np

from cluster.group import Leader
from cluster.member import Member
from cluster.messages import Command, Logits, Step, WarmUp
from engine.errors import ReplicaGroupError
from engine.models.decoder import Decoder, Params
from engine.plan import PlanRow, SampledToken, StepPlan, StepResult
from engine.runner import CompilationCounter, Progress, StepHandle, StepRunner
from engine.sizes import RunnerSizes

T = TypeVar("T")


class RunningDigest:
    """A digest over all commands and results so far, in their order."""

    def __init__(self) -> None:
        self._state = b""

    def add(self, command: bytes, outcome: str) -> bytes:
        """The digest after this command too."""
        digest = hashlib.blake2b(self._state, digest_size=16)
        digest.update(len(command).to_bytes(8, "big") + command + outcome.encode())
        self._state = digest.digest()
        return self._state


def describe_result(result: StepResult) -> str:
    """The sampled tokens. Log-probabilities are left out: machines of another make may round them differently."""

    def ids(outcome: object) -> object:
        if isinstance(outcome, tuple):
            return [ids(part) for part in outcome]
        return outcome.token_id if isinstance(outcome, SampledToken) else outcome

    return repr((ids(result.prefill), ids(result.decode)))


def describe_runner(runner: StepRunner) -> str:
    """What decides which programs a runner has, and what they compute."""
    shapes = {
        f"{module}/{name}": (array.shape, str(array.dtype), array.sharding.shard_shape(array.shape))
        for module, arrays in runner.params.items()
        for name, array in arrays.items()
    }
    decoder = runner.decoder
    mesh = (dict(decoder.mesh.shape), [device.id for device in decoder.mesh.devices.flat])
    programs = (decoder.config, decoder.attention_kernel, sorted(runner.compiled_programs))
    return repr((runner.sizes, mesh, programs, sorted(shapes.items())))


class LockstepRunner:
    """A `StepRunner` on the leader whose every step the followers run, too.

    It has the runner's interface; whatever runs no program is passed on. Every call may raise `ReplicaGroupError`
    naming the host that is gone, silent or has diverged.
    """

    def __init__(self, runner: StepRunner, leader: Leader) -> None:
        self._runner, self._leader = runner, leader
        self._digest = RunningDigest()
        self._under_way: deque[tuple[int, bytes]] = deque()
        """Numbers and commands of the steps that are dispatched and not fetched."""

    @property
    def decoder(self) -> Decoder:
        """The model on the mesh of all hosts."""
        return self._runner.decoder

    @property
    def params(self) -> Params:
        """The weights, of which this process holds its own parts."""
        return self._runner.params

    @property
    def sizes(self) -> RunnerSizes:
        """Sizes of batches and cache, the same on every host."""
        return self._runner.sizes

    @property
    def compilations(self) -> CompilationCounter:
        """What this process has compiled."""
        return self._runner.compilations

    @property
    def compiled_programs(self) -> dict[str, jax.stages.Compiled]:
        """This process's programs, by name."""
        return self._runner.compiled_programs

    @property
    def num_compilations_since_warm_up(self) -> int:
        """On all hosts together; of the followers, as of the last step that they have answered."""
        return self._runner.num_compilations_since_warm_up + self._leader.num_compilations

    def memory_bytes(self) -> dict[str, int]:
        """Bytes over all devices of all hosts of weights and cache."""
        return self._runner.memory_bytes()

    def warm_up(self, progress: Progress | None = None) -> dict[str, float]:
        """Compiles and runs every program on every host; the seconds each took here. Returns once all are done."""
        number, command = self._leader.broadcast(WarmUp, "the warm-up", self._leader.timeouts.warm_up_s)
        seconds = self._try(lambda: self._runner.warm_up(progress))
        self._leader.expect(number, self._digest.add(command, describe_runner(self._runner)))
        self._leader.wait_for(number)
        return seconds

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Starts a step on every host."""
        number, command = self._leader.broadcast(
            lambda number: Step(number, plan), "a step", self._leader.timeouts.step_s
        )
        handle = self._try(lambda: self._runner.dispatch(plan))
        self._under_way.append((number, command))
        return handle

    def fetch(self, handle: StepHandle) -> StepResult:
        """The result of a dispatched step; steps are fetched in the order in which they were dispatched."""
        result = self._try(lambda: self._runner.fetch(handle))
        number, command = self._under_way.popleft()
        self._leader.expect(number, self._digest.add(command, describe_result(result)))
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a step to its end."""
        return self.fetch(self.dispatch(plan))

    def all_logits(self, rows: Sequence[PlanRow], rows_per_shard: int, num_tokens: int) -> np.ndarray:
        """As `StepRunner.all_logits`."""
        number, command = self._leader.broadcast(
            lambda number: Logits(number, tuple(rows), rows_per_shard, num_tokens),
            "a step that returns logits",
            self._leader.timeouts.warm_up_s,
        )
        logits = self._try(lambda: self._runner.all_logits(rows, rows_per_shard, num_tokens))
        self._leader.expect(number, self._digest.add(command, ""))
        return logits

    def check_health(self) -> None:
        """Raises `ReplicaGroupError` where the replica cannot go on."""
        self._leader.check()

    def stop(self) -> None:
        """Ends the followers after the steps that they have."""
        self._leader.stop()

    def _try(self, run: Callable[[], T]) -> T:
        """Of a step that fails, the cause may be another host."""
        try:
            return run()
        except Exception as error:
            raise self._leader.explain(error) from error


def follow(runner: StepRunner, member: Member) -> None:
    """Carries out the leader's commands until it says stop.

    Raises `ReplicaGroupError` where the leader is gone, and what a step raises, of which the leader is told. Results
    are fetched on a thread of their own, so that the next step is dispatched while one runs.
    """
    answers = _Answers(runner, member)
    try:
        for command, payload in member.commands():
            answers.check()
            answers.put(payload, command.number, _begin(runner, command))
        answers.close()
    except ReplicaGroupError:
        member.close()
        raise
    except Exception as error:
        member.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        answers.abandon()
    member.close()


def _begin(runner: StepRunner, command: Command) -> Callable[[], str]:
    """Starts a command; what is returned waits for its outcome and describes it."""
    if isinstance(command, Step):
        handle = runner.dispatch(command.plan)
        return lambda: describe_result(runner.fetch(handle))
    if isinstance(command, Logits):
        runner.all_logits(command.rows, command.rows_per_shard, command.num_tokens)
        return lambda: ""
    runner.warm_up()
    return lambda: describe_runner(runner)


class _Answers:
    """Fetches results and tells the leader their digest, in the order of the commands."""

    def __init__(self, runner: StepRunner, member: Member) -> None:
        self._runner, self._member = runner, member
        self._digest = RunningDigest()
        self._queue: queue.SimpleQueue[tuple[bytes, int, Callable[[], str]] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="replica-answers", daemon=True)
        self._thread.start()

    def put(self, command: bytes, number: int, outcome: Callable[[], str]) -> None:
        self._queue.put((command, number, outcome))

    def check(self) -> None:
        """Raises what a fetch raised."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Returns when everything is answered."""
        self.abandon()
        self._thread.join()
        self.check()

    def abandon(self) -> None:
        """Nothing more will be put."""
        self._queue.put(None)

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                command, number, outcome = item
                digest = self._digest.add(command, outcome())
                self._member.answer(number, digest, self._runner.num_compilations_since_warm_up)
        except Exception as error:
            self._error = error
            if not isinstance(error, ReplicaGroupError):
                self._member.fail(f"{type(error).__name__}: {error}")
