"""What decides who follows whom; a whole replica over hosts runs in tests/integration/test_hosts.py."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from serve_app.builder import build_engine, mesh_config, num_devices
from serve_app.config import AppConfig, parse_app_config
from tests.fakes.serving import fake_engine, fake_text

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own
    from serve_app.app import build_app
    from serve_app.hosts import build_engine as build_engine_over_hosts
    from serve_app.hosts import replica_identity


def config(model: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **mesh: Any) -> AppConfig:
    """A config of two hosts of four devices."""
    return parse_app_config(
        {
            "model": {"source": "nowhere/fake", **(model or {})},
            "engine": engine or {},
            "mesh": {"model": 4, "hosts_along_model": 2, **mesh},
            "serving": {"replica_num_cpus": 3.0, "replica_num_gpus": 4.0},
        }
    )


def engine_deployment(config: AppConfig) -> Any:
    """The deployment of replicas as it is bound."""
    app = build_app(config, fake_engine, fake_text)
    return app._bound_deployment.init_args[2]._bound_deployment  # Serve shows it nowhere else


@pytest.mark.parametrize(("placement", "strategy"), [("apart", "STRICT_SPREAD"), ("packed", "PACK")])
def test_each_host_of_a_replica_has_a_bundle(placement: str, strategy: str) -> None:
    options = engine_deployment(config(host_placement=placement))._replica_config
    assert options.placement_group_bundles == [{"CPU": 3.0, "GPU": 4.0}] * 2
    assert options.placement_group_strategy == strategy


def test_a_replica_of_one_host_has_none() -> None:
    assert engine_deployment(config(hosts_along_model=1))._replica_config.placement_group_bundles is None


def test_the_mesh_is_that_of_all_hosts() -> None:
    assert mesh_config(config(data=2, hosts_along_data=3)).shape == (6, 8)
    assert num_devices(config()) == 4
    assert num_devices(config(devices_per_host=6)) == 6


def test_only_a_replica_starts_hosts() -> None:
    with pytest.raises(ConfigError, match="spans several hosts; only a replica of Ray Serve can start them"):
        build_engine(config())


def test_guesses_of_a_draft_model_need_one_host() -> None:
    draft = config({"draft_source": "nowhere/small"}, {"num_draft_tokens": 2})
    with pytest.raises(ConfigError, match="draft_source is given, and the mesh spans several hosts"):
        build_engine_over_hosts(draft)


def test_the_identity_shows_another_config_or_another_checkpoint(tmp_path: Path) -> None:
    def identity(num_bytes: int, **mesh: Any) -> dict[str, str]:
        (tmp_path / "model.safetensors").write_bytes(bytes(num_bytes))
        return replica_identity(config(**mesh), tmp_path)

    first = identity(5)
    assert identity(5) == first
    assert {name for name, value in identity(6).items() if value != first[name]} == {"checkpoint"}
    assert {name for name, value in identity(5, data=2).items() if value != first[name]} == {"config"}
    # What else lies beside a model differs from machine to machine.
    (tmp_path / ".cache").write_text("x")
    (tmp_path / "README.md").write_text("x")
    assert identity(5) == first
