"""`python -m tests.cluster.replica_host`: one process of a replica. Its task is one JSON line on stdin.

It writes JSON lines: a leader first its followers' invitations.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np


def end_with_the_test() -> None:
    """Ends this process when its stdin ends, as it does however the test ended."""
    sys.stdin.read()
    os._exit(3)


def say(**values: object) -> None:
    """One line."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class Relay:
    """A runner that is another one from each warm-up on: those of several cases one after the other."""

    def __init__(self, cases: list[Any]) -> None:
        self._waiting = list(cases)
        self._runner: Any = None

    def warm_up(self, progress: object = None) -> object:
        """Of the next case's runner."""
        from tests.cluster.cases import make_runner

        # The last answers of a follower may still be under way, on a thread of their own; they have a runner all along.
        self._runner = make_runner(self._waiting.pop(0))
        return self._runner.warm_up(progress)

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)


def lead(task: dict[str, Any]) -> None:
    """Runs all cases of a topology, or steps until it is ended, or nothing."""
    from cluster.group import Timeouts
    from cluster.multihost import Gathering, leave

    gathering = Gathering(task["num_hosts"], task.get("identity"), timeouts=Timeouts(**task["timeouts"]))
    say(invitations=[gathering.invitation(rank).to_json() for rank in range(1, task["num_hosts"])])
    leader = gathering.start()
    say(started=leader.names, num_devices=[jax.local_device_count(), jax.device_count()])
    try:
        carry_out(task, leader)
    except BaseException as error:
        leader.abort(str(error))
        raise
    leave()
    say(left=True)


def carry_out(task: dict[str, Any], leader: Any) -> None:
    """What the leader does once all have come."""
    from cluster.lockstep import LockstepRunner

    runner: Any = LockstepRunner(make_runner(task), leader)
    if task["mode"] == "idle":
        time.sleep(600)
    elif task["mode"] == "steps":
        step_for_ever(runner)
    for case in task_cases(task):
        from tests.cluster.cases import outcomes

        runner.warm_up()
        np.savez(Path(task["out"]) / f"{case.name}.npz", **outcomes(runner))
        say(done=case.name)
    runner.stop()


def step_for_ever(runner: Any) -> None:
    """Until this process is ended."""
    from engine.plan import PlanRow, StepPlan
    from engine.request import SamplingParams

    runner.warm_up()
    for number in range(10**9):
        row = PlanRow(0, 0, number % 1000, 1, (5,), (0,), SamplingParams(), True)
        result = runner.execute(StepPlan((), 0, (row,), 1))
        if number == 20:
            say(stepping=True, token=result.decode[0][0].token_id)


def make_runner(task: dict[str, Any]) -> Any:
    """The same in every process."""
    from tests.cluster.collective_runner import CollectiveRunner

    return Relay(task_cases(task)) if task["mode"] == "cases" else CollectiveRunner()


def follow_leader(task: dict[str, Any]) -> None:
    """Does what the leader says."""
    from cluster.lockstep import follow
    from cluster.multihost import Invitation, join, leave

    member = join(Invitation.from_json(task["invitation"]), task.get("identity"))
    say(joined=member.rank)
    follow(make_runner(task), member)
    leave()
    say(left=True)


def task_cases(task: dict[str, Any]) -> list[Any]:
    """The cases that a task names."""
    from tests.cluster.cases import CASES

    return [case for case in CASES[task["num_hosts"]] if case.name in task["cases"]]


def main() -> None:
    """The process."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_the_test, daemon=True).start()
    jax.config.update("jax_num_cpu_devices", 8 // task["num_hosts"])
    for name, value in task["jax_config"].items():
        jax.config.update(name, value)
    if "invitation" in task:
        follow_leader(task)
    else:
        lead(task)


if __name__ == "__main__":
    main()
