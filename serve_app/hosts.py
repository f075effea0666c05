"""A replica whose mesh spans several hosts: the Serve replica leads, and Ray actors on the other hosts follow."""

import hashlib
import json
from functools import partial
from pathlib import Path

import ray

from cluster.group import Timeouts, exit_process
from cluster.lockstep import LockstepRunner, follow
from cluster.mesh import build_mesh
from cluster.multihost import Gathering, Invitation, join, leave
from cluster.placement import start_followers
from cluster.platform import check_platform, choose_platform
from engine.engine import Engine
from engine.errors import ConfigError, ReplicaGroupError
from engine.request import EngineProtocol
from engine.runner import StepRunner
from engine.weights.source import resolve_source
from serve_app.builder import find_model, load_model, mesh_config, num_devices, prepare_compilation_cache
from serve_app.config import AppConfig
from serve_app.console import configure_logging, say
from serve_app.text.base import Tokenizer
from serve_app.text_builder import load_model_tokenizer


def build_engine(config: AppConfig) -> tuple[EngineProtocol, Tokenizer]:
    """As `serve_app.builder.build_engine`, in a Serve replica with a placement group of one bundle for each host.

    Raises `ReplicaGroupError` naming a host that did not come, too.
    """
    if config.model.draft_source is not None:
        raise ConfigError("model.draft_source is given, and the mesh spans several hosts; guesses need a mesh of one")
    path = resolve_source(config.model.source)
    tokenizer = load_model_tokenizer(config)
    gathering = Gathering(
        config.mesh.num_hosts,
        replica_identity(config, path),
        host=ray.util.get_node_ip_address(),
        timeouts=Timeouts(
            start_s=config.mesh.host_start_timeout_s,
            silence_s=config.mesh.host_silence_timeout_s,
            step_s=config.serving.step_timeout_s,
        ),
        on_failure=_end_replica,
    )
    with gathering:
        resources = {"CPU": config.serving.replica_num_cpus, "GPU": config.serving.replica_num_gpus}
        start_followers(gathering, partial(follow_leader, config), resources)
        _choose_platform(config)
        leader = gathering.start()
        say(f"hosts of the replica: this one, {', '.join(leader.names.values())}")
        runner = LockstepRunner(_load_runner(config), leader)
        return Engine(runner, config.engine.to_engine_config()), tokenizer


def follow_leader(config: AppConfig, invitation: Invitation) -> None:
    """A follower's whole life, in a process of its own. Raises what ends it early, of which the leader is told."""
    configure_logging(config.log_level)
    _choose_platform(config)
    identity = replica_identity(config, resolve_source(config.model.source))
    with join(invitation, identity) as member:
        follow(_load_runner(config), member)
    leave()


def replica_identity(config: AppConfig, path: Path) -> dict[str, str]:
    """What must be the same on all hosts: what the config says of the model, and the checkpoint's files."""
    said = {name: getattr(config, name).model_dump(mode="json") for name in ["model", "engine", "mesh"]}
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    sizes = [(str(file.relative_to(path)), file.stat().st_size) for file in files if _belongs_to_model(file, path)]
    return {"config": _digest(said), "checkpoint": f"{path.name} ({len(sizes)} files, digest {_digest(sizes)})"}


def _belongs_to_model(file: Path, model: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(model).parts)
    return file.is_file() and not hidden and file.suffix not in (".md", ".txt")


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _choose_platform(config: AppConfig) -> None:
    choose_platform(config.mesh.platform, num_devices(config), config.mesh.memory_fraction)
    prepare_compilation_cache(config.compilation_cache_dir)


def _load_runner(config: AppConfig) -> StepRunner:
    check_platform(config.mesh.platform)
    path, model = find_model("model", config.model.source, config.model.window)
    engine_config = config.engine.to_engine_config()
    decoder, params = load_model(path, model, build_mesh(mesh_config(config)), engine_config)
    return StepRunner(decoder, params, engine_config)


def _end_replica(error: ReplicaGroupError) -> None:
    """Serve sees that the process has ended, and starts another replica."""
    say(f"a replica ends: {error}")
    exit_process(error)
