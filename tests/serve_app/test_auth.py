"""API keys: who gets in, whom it is counted to, and that no key shows anywhere."""

import hashlib
import hmac
import logging
import pickle
from collections.abc import Mapping

import pytest

from engine.errors import ConfigError
from serve_app.auth import ApiKey, Authenticator, AuthSection
from serve_app.errors import InvalidApiKeyError
from tests.serve_app.harness import Connection, run, running

ALICE, BOB = "sk-alice-1", "sk-bob-2"
BODY = {"model": "fake", "prompt": "a", "max_tokens": 2}
GUARDED = ["/v1/models", "/v1/models/fake", "/version"]
OPEN = ["/health", "/ready", "/metrics"]


def digest(key: str) -> str:
    """The key as a config gives it."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def auth(**keys: str) -> dict[str, object]:
    """An `auth` section of these keys."""
    return {"keys": [{"name": name, "key": key} for name, key in keys.items()]}


AUTH = auth(alice=digest(ALICE), bob=digest(BOB).upper().replace("SHA256", "sha256"))


def bearer(key: str) -> dict[str, str]:
    """The header of a key."""
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "no API key was sent; expected the header Authorization: Bearer <key>"),
        ({"authorization": ""}, "no API key was sent"),
        ({"authorization": "Bearer"}, "no API key was sent"),
        ({"authorization": "Bearer  "}, "no API key was sent"),
        ({"authorization": ALICE}, "no API key was sent"),
        ({"authorization": f"Basic {ALICE}"}, "no API key was sent"),
        (bearer("sk-guess"), "the API key that was sent is not one of this server's keys"),
        (bearer(ALICE[:-1]), "is not one of this server's keys"),
        (bearer(ALICE + "x"), "is not one of this server's keys"),
        (bearer(ALICE.upper()), "is not one of this server's keys"),
        (bearer(digest(ALICE)), "is not one of this server's keys"),
        (bearer("alice"), "is not one of this server's keys"),
    ],
)
def test_a_request_without_a_valid_key_is_a_401(
    headers: Mapping[str, str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def test() -> None:
        async with running(auth=AUTH) as h:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                answer = await h.post(path, BODY, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                error = answer.json()["error"]
                assert (error["type"], error["code"], error["param"]) == (
                    "invalid_request_error",
                    "invalid_api_key",
                    None,
                )
                assert message in error["message"]
            for path in GUARDED:
                assert (await h.get(path, headers=headers)).status_code == 401
            assert h.engine.requests == []

    run(test)
    assert "refused with 401" in caplog.text
    shown = [key for key in ("sk-guess", ALICE[:-1], ALICE.upper()) if key in caplog.text]
    assert shown == []


def test_the_tenant_of_a_request_is_the_name_of_its_key() -> None:
    async def test() -> None:
        async with running(auth=AUTH) as h:
            for headers in (bearer(ALICE), bearer(BOB), {"authorization": f"bearer   {ALICE} "}):
                assert (await h.post("/v1/completions", BODY, headers=headers)).status_code == 200
            chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            assert (await h.post("/v1/chat/completions", chat, headers=bearer(BOB))).status_code == 200
            assert [request.tenant for request in h.engine.requests] == ["alice", "bob", "alice", "bob"]
            for path in GUARDED:
                assert (await h.get(path, headers=bearer(BOB))).status_code == 200

    run(test)


def test_probes_and_scrapers_need_no_key() -> None:
    async def test() -> None:
        async with running(auth=AUTH) as h:
            for path in OPEN:
                assert (await h.get(path)).status_code == 200
            assert (await h.post("/v1/completions", BODY)).status_code == 401
            metrics = (await h.get("/metrics")).text
            assert 'llm_http_requests_total{path="/v1/completions",status="401"} 1.0' in metrics

    run(test)


def test_a_401_comes_before_the_body_is_read() -> None:
    async def test() -> None:
        async with running(auth=AUTH, max_body_bytes=10) as h:
            connection = Connection(h.api.app, "/v1/completions", b"x" * 1000)
            assert (await connection.sent.get())["status"] == 401
            await connection.task

    run(test)


def test_without_keys_everybody_may_and_tenants_are_digests_of_tokens() -> None:
    async def test() -> None:
        async with running() as h:
            for headers in ({}, bearer("one"), bearer("two"), bearer("one"), {"authorization": "Basic one"}):
                assert (await h.post("/v1/completions", BODY, headers=headers)).status_code == 200
            nobody, one, two, again, basic = [request.tenant for request in h.engine.requests]
            assert (nobody, basic) == (None, None)
            assert one == digest("one")[: len("sha256:") + 16]
            assert one == again != two

    run(test)


def test_keys_of_one_name_are_one_tenant() -> None:
    section = AuthSection(keys=[ApiKey(name="a", key=digest("old")), ApiKey(name="a", key=digest("new"))])
    authenticator = Authenticator(section)
    assert {authenticator.tenant_of(f"Bearer {key}") for key in ("old", "new")} == {"a"}


def test_a_key_may_be_any_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "schlüssel")
    authenticator = Authenticator(AuthSection(keys=[ApiKey(name="a", key="env:A_KEY")]))
    as_starlette_decodes_it = "schlüssel".encode().decode("latin-1")
    assert authenticator.tenant_of(f"Bearer {as_starlette_decodes_it}") == "a"


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def spy(known: str, given: str) -> bool:
        compared.append(known)
        return hmac_compare(known, given)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", spy)
    keys = [ApiKey(name=name, key=digest(name)) for name in ("a", "b", "c")]
    authenticator = Authenticator(AuthSection(keys=keys))
    assert authenticator.tenant_of("Bearer a") == "a"
    with pytest.raises(InvalidApiKeyError):
        authenticator.tenant_of("Bearer d")
    assert len(compared) == 6


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_variable_that_is_not_there_is_named(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("A_KEY", value)
    section = AuthSection(keys=[ApiKey(name="a", key="env:A_KEY")])
    with pytest.raises(ConfigError, match="the key 'a' is in the variable A_KEY, which is not set or empty"):
        Authenticator(section)


def test_one_key_under_two_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", ALICE)
    section = AuthSection(keys=[ApiKey(name="a", key="env:A_KEY"), ApiKey(name="b", key=digest(ALICE))])
    with pytest.raises(ConfigError, match="'a' and 'b' have the same key") as caught:
        section.resolved()
    assert ALICE not in str(caught.value)


def test_what_travels_to_the_ingress_is_digests_and_needs_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", ALICE)
    resolved = AuthSection(keys=[ApiKey(name="a", key="env:A_KEY")]).resolved()
    monkeypatch.delenv("A_KEY")
    sent = pickle.dumps(resolved)
    assert ALICE.encode() not in sent
    assert Authenticator(pickle.loads(sent)).tenant_of(f"Bearer {ALICE}") == "a"
