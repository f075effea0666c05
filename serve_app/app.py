"""The Serve application: `serve run configs/app.yaml` and `python -m serve_app` both come here."""

from typing import Any, cast

from ray import serve
from ray.serve import Application, Deployment

from serve_app.config import AppConfig, parse_app_config
from serve_app.factories import EngineFactory, TextFactory, build_engine_lazily, build_text_lazily
from serve_app.ingress import Ingress
from serve_app.replica import Replica

# Each ingress call waits on one replica call; a few more may be refused or ask for /health meanwhile.
_INGRESS_HEADROOM = 64

# Serve's own default is two requests, which would leave most slots empty.
_SLOTS_IN_USE = 0.75


def build(args: dict[str, Any]) -> Application:
    """The application of a config file; `args` is that of the file. Raises `ConfigError` naming every wrong field."""
    return build_app(parse_app_config(args), build_engine_lazily, build_text_lazily)


def build_app(config: AppConfig, engine_factory: EngineFactory, text_factory: TextFactory) -> Application:
    """The application with the given factories (they travel to the replicas by pickle).

    Raises `ConfigError` where an API key's variable is not set.
    """
    # Variables are read here: the processes that check keys may run on machines that do not have them.
    config = config.model_copy(update={"auth": config.auth.resolved()})
    serving = config.serving
    common: dict[str, Any] = {
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": serving.graceful_shutdown_s,
        "health_check_period_s": serving.health_check_period_s,
        "health_check_timeout_s": serving.health_check_timeout_s,
        "logging_config": {"enable_access_log": False},
    }
    replicas = _deployment(Replica).options(
        max_ongoing_requests=config.max_ongoing_requests,
        # Calls that wait in an ingress until Serve has picked a replica: all of a burst that the replicas could hold.
        max_queued_requests=serving.max_replicas * config.max_ongoing_requests,
        # A model that does not load does not load the third time either.
        max_constructor_retry_count=2,
        ray_actor_options={"num_cpus": serving.replica_num_cpus, "num_gpus": serving.replica_num_gpus},
        **_hosts(config),
        max_surge_percent=serving.max_surge_percent,
        **_scale(config),
        **common,
    )
    ingress = _deployment(Ingress).options(
        num_replicas=serving.num_ingress_replicas,
        max_ongoing_requests=serving.max_replicas * config.max_ongoing_requests + _INGRESS_HEADROOM,
        # One more of them costs little, and without it the address would not answer for a moment.
        max_surge_percent=100,
        ray_actor_options={"num_cpus": serving.ingress_num_cpus},
        **common,
    )
    return ingress.bind(config, text_factory, replicas.bind(config, engine_factory))


def _hosts(config: AppConfig) -> dict[str, Any]:
    """Serve's options for where the hosts of a replica run: it takes the first bundle, its followers the others."""
    num_hosts, serving = config.mesh.num_hosts, config.serving
    if num_hosts == 1:
        return {}
    bundle = {"CPU": serving.replica_num_cpus, "GPU": serving.replica_num_gpus}
    return {
        "placement_group_bundles": [{name: number for name, number in bundle.items() if number}] * num_hosts,
        "placement_group_strategy": "STRICT_SPREAD" if config.mesh.host_placement == "apart" else "PACK",
    }


def _scale(config: AppConfig) -> dict[str, Any]:
    """Serve's options for the number of engine replicas."""
    scaling = config.serving.autoscaling
    if scaling is None:
        return {"num_replicas": config.serving.num_replicas}
    target = scaling.target_ongoing_requests or _SLOTS_IN_USE * config.engine.num_slots
    return {"autoscaling_config": {**scaling.model_dump(exclude_none=True), "target_ongoing_requests": target}}


def _deployment(deployment_class: type) -> Deployment:
    """`serve.deployment` used as a function; its declared type is only that of a decorator factory."""
    return cast(Deployment, serve.deployment(deployment_class))
