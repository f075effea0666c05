"""API keys: who may use the server, and whom a request is counted to.

No key is kept in clear text here, and none is part of an error or a log line.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from engine.errors import ConfigError
from serve_app.errors import InvalidApiKeyError
from serve_app.strict import StrictModel

_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}")
_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")

_TENANT_DIGITS = 16


def _reference(value: object) -> str:
    # What stands here by mistake may be a key: it is not shown.
    if isinstance(value, str) and (_DIGEST.fullmatch(value) or _VARIABLE.fullmatch(value)):
        return value
    raise ValueError(
        "expected sha256:<64 hexadecimal digits> (the key's SHA-256) or env:<variable that holds the key>, never the "
        "key itself"
    )


class ApiKey(StrictModel):
    """One key that clients may send."""

    name: str = Field(
        min_length=1,
        description="Whom its requests are counted to (their tenant). Keys of one name are one tenant: for rotation.",
    )
    key: Annotated[str, BeforeValidator(_reference)] = Field(
        description="sha256:<hexadecimal SHA-256 of the key> or env:<variable that holds it where the server is "
        "started>. Never the key itself.",
    )


class AuthSection(StrictModel):
    """Who may use the server."""

    keys: list[ApiKey] = Field(
        default_factory=list,
        repr=False,
        description="Where there are any, requests need one of them as `Authorization: Bearer <key>`.",
    )

    def resolved(self) -> "AuthSection":
        """The same with every variable read: digests only.

        Raises `ConfigError` where a variable is not set or empty, or two names have the same key.
        """
        keys = [ApiKey(name=key.name, key=f"sha256:{_digest_of(key)}") for key in self.keys]
        names: dict[str, str] = {}
        for key in keys:
            if names.setdefault(key.key, key.name) != key.name:
                raise ConfigError(f"auth.keys: {names[key.key]!r} and {key.name!r} have the same key")
        return AuthSection(keys=keys)


def _digest_of(key: ApiKey) -> str:
    kind, _, reference = key.key.partition(":")
    if kind == "sha256":
        return reference.lower()
    value = os.environ.get(reference, "").strip()
    if not value:
        raise ConfigError(f"auth.keys: the key {key.name!r} is in the variable {reference}, which is not set or empty")
    return _sha256(os.fsencode(value))


class Authenticator:
    """Checks the `Authorization` header of requests against the keys of a config."""

    def __init__(self, section: AuthSection) -> None:
        """Raises `ConfigError`; see `AuthSection.resolved`."""
        self._names_by_digest: Mapping[str, str] = {
            key.key.removeprefix("sha256:"): key.name for key in section.resolved().keys
        }

    def tenant_of(self, authorization: str | None) -> str | None:
        """The name of the request's key; without keys in the config a digest of the token, or None where none is sent.

        Raises `InvalidApiKeyError` where a key is needed and none, or an unknown one, is sent.
        """
        token = _bearer_token(authorization)
        if not self._names_by_digest:
            return None if token is None else f"sha256:{_sha256(token)[:_TENANT_DIGITS]}"
        if token is None:
            raise InvalidApiKeyError("no API key was sent; expected the header Authorization: Bearer <key>")
        found = self._name_of(_sha256(token))
        if found is None:
            raise InvalidApiKeyError("the API key that was sent is not one of this server's keys")
        return found

    def _name_of(self, digest: str) -> str | None:
        # Every key is compared, each in constant time: how long it takes says nothing of how near a guess was.
        matches = [name for known, name in self._names_by_digest.items() if hmac.compare_digest(known, digest)]
        return matches[0] if matches else None


def _bearer_token(authorization: str | None) -> bytes | None:
    """The token as it was sent; headers reach the application decoded as latin-1."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    return token.strip().encode("latin-1") or None if scheme.lower() == "bearer" else None


def _sha256(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()
