"""The Serve application from a config."""

from typing import Any

import pytest

from engine.errors import ConfigError

# Ray Serve's own modules warn while they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ARGS: dict[str, Any] = {
    "model": {"source": "somewhere/name"},
    "auth": {"keys": [{"name": "alice", "key": "env:ALICE_KEY"}]},
}


def test_keys_are_read_where_the_application_is_built_and_only_digests_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.app import build

    monkeypatch.setenv("ALICE_KEY", "sk-alice")
    ingress: Any = build(ARGS)._bound_deployment
    replicas = ingress.init_args[2]._bound_deployment
    for deployment in (ingress, replicas):
        (key,) = deployment.init_args[0].auth.keys
        assert key.name == "alice"
        assert key.key.startswith("sha256:")


def test_an_application_without_its_keys_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.app import build

    monkeypatch.delenv("ALICE_KEY", raising=False)
    with pytest.raises(ConfigError, match="the variable ALICE_KEY, which is not set or empty"):
        build(ARGS)
