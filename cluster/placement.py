"""The followers of a replica as Ray actors: one in each further bundle of the leader's placement group.

Ray ends an actor with the one that started it, and each ends by itself when it loses its leader (`cluster.group`): no
follower outlives its replica.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.multihost import Gathering, Invitation
from engine.errors import ConfigError

FollowerTask = Callable[[Invitation], None]
"""Comes to the leader and follows it to its end. It travels by pickle."""


class _Follower:
    def run(self, task: FollowerTask, invitation: Invitation) -> None:
        task(invitation)


def start_followers(gathering: Gathering, task: FollowerTask, resources: Mapping[str, float]) -> None:
    """Starts one actor for each follower that `gathering` waits for, in bundle `rank` of this actor's placement group.

    `resources` are those of a bundle, by Ray's names. What ends an actor is told to `gathering`. Raises `ConfigError`
    where this actor has no placement group, or one with another number of bundles.
    """
    group = get_current_placement_group()
    num_bundles = 0 if group is None else group.bundle_count
    if group is None or num_bundles != gathering.num_hosts:
        raise ConfigError(
            f"a replica over {gathering.num_hosts} hosts needs a placement group with as many bundles; it has "
            f"{num_bundles}"
        )
    options: dict[str, Any] = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": {name: number for name, number in resources.items() if name not in ("CPU", "GPU")},
        "max_restarts": 0,
    }
    for rank in range(1, gathering.num_hosts):
        placement = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        actor = ray.remote(_Follower).options(**options, scheduling_strategy=placement).remote()
        # The thread holds the actor: without a handle Ray would end it.
        watch = threading.Thread(target=_watch, args=(gathering, actor, task, rank), daemon=True)
        watch.start()


def _watch(gathering: Gathering, actor: "ray.actor.ActorHandle", task: FollowerTask, rank: int) -> None:
    try:
        ray.get(actor.run.remote(task, gathering.invitation(rank)))
    except RayTaskError as error:
        cause = error.cause or error
        gathering.lose(rank, f"{type(cause).__name__}: {cause}")
    except Exception as error:
        gathering.lose(rank, str(error))
