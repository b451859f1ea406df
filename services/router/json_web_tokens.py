"""JSON Web Tokens name tenants beside API keys: a provider signs them, and a file has its public keys.

    {"kid": "2026-11", "alg": "RS256"}.{"tenant": "acme", "exp": 1796000000, ...}.signature

A token is accepted until it expires if a key of the file (a JWKS) has signed it and, where the router is told
them, its audience and issuer fit. The file is followed as that of API keys is: while it cannot be read no
token is accepted.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from services.observe import log_lines
from services.router.api_keys import BAD_TOKEN, EXPIRED_TOKEN, digest
from services.router.callers import Caller
from services.router.followed_file import FollowedFile
from services.values.errors import ConfigError, Unauthenticated
from services.values.request import is_id

log = logging.getLogger(__name__)

# With a symmetric key whoever can check a token can make one.
_ALGORITHMS = frozenset(f"{family}{bits}" for family in ("RS", "PS", "ES") for bits in (256, 384, 512)) | {
    "EdDSA"
}
_MOST_KNOWN = 4096  # Checking a signature takes a tenth of a millisecond, and clients repeat their tokens.
_SKEW_S = 60.0  # The clock of an identity provider may be so far ahead.


@dataclass(frozen=True, slots=True)
class TokenRules:
    audience: str = ""
    issuer: str = ""
    tenant_claim: str = "tenant"


class Tokens:
    """The constructor raises ConfigError when the file cannot be read, or has no key that may sign."""

    def __init__(self, path: Path, rules: TokenRules, clock: Callable[[], float] = time.time) -> None:
        self._rules = rules
        self._clock = clock
        self._file = FollowedFile("--jwks-file", path, _signing_keys, unreadable="token_keys_revoked")
        self._keys = self._file.content
        self._known: dict[bytes, tuple[Caller, float]] = {}  # It has when each token expires.

    def caller(self, token: str) -> Caller:
        """Return the token's caller. Raises Unauthenticated."""
        self._follow()
        key = digest(token)
        if key not in self._known:
            checked = self._checked(token)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = checked
        caller, expires_s = self._known[key]
        if self._clock() >= expires_s:
            raise Unauthenticated(EXPIRED_TOKEN)
        return caller

    def _checked(self, token: str) -> tuple[Caller, float]:
        try:
            key = self._key_of(jwt.get_unverified_header(token))
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._rules.audience or None,
                issuer=self._rules.issuer or None,
                leeway=_SKEW_S,
                # This looks at the time itself, at each use of a token.
                options={"require": ["exp"], "verify_exp": False, "verify_aud": bool(self._rules.audience)},
            )
            expires_s = float(claims["exp"])
            if not math.isfinite(expires_s):
                raise ValueError("it never expires")
        except (jwt.PyJWTError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise Unauthenticated(BAD_TOKEN) from error
        tenant = claims.get(self._rules.tenant_claim)
        if not (isinstance(tenant, str) and tenant and is_id(tenant)):
            raise Unauthenticated(BAD_TOKEN)
        return Caller(tenant), expires_s

    def _key_of(self, header: Mapping[str, Any]) -> jwt.PyJWK:
        """Return the key that the token names, or the only one where it names none. Raises KeyError."""
        if "kid" not in header and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys[header["kid"]]

    def _follow(self) -> None:
        if self._file.is_new():
            log_lines.event(log, "token_keys_read", keys=len(self._file.content))
        elif not self._file.problem:
            return
        self._keys = {} if self._file.problem else self._file.content
        self._known.clear()


def _signing_keys(text: str) -> Mapping[str, jwt.PyJWK]:
    """Return the keys that may sign, by their ids."""
    try:
        read = jwt.PyJWKSet.from_json(text).keys
        signing = [key for key in read if key.algorithm_name in _ALGORITHMS and _may_sign(key)]
        keys = {key.key_id or "": key for key in signing}
    except (ValueError, TypeError, AttributeError, RecursionError, jwt.PyJWTError) as error:
        raise ConfigError(str(error)) from error
    if private := [name for name, key in keys.items() if hasattr(key.key, "private_bytes")]:
        raise ConfigError(
            f"its key {private[0]!r} is private: whoever has it can make tokens; list public keys"
        )
    if len(keys) < len(signing):
        raise ConfigError("it has two keys of one id (kid), or without one")
    if not keys:
        raise ConfigError("it holds no public key")
    return keys


def _may_sign(key: jwt.PyJWK) -> bool:
    return key.public_key_use in (None, "sig")
