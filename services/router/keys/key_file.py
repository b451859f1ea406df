"""The text of a file of keys: one a line, and behind it what it is good for. Pure.

s3cret-of-everybody                      names whatever tenant it likes, as its requests do
s3cret-of-acme     tenant=acme           its requests are acme's, and it watches acme's alone
s3cret-of-ours     operator              may watch everybody's
"""

import hashlib
from collections.abc import Collection, Mapping

from services.router.keys.callers import Caller
from services.values.errors import ConfigError
from services.values.request import MAX_ID_CHARS, is_id

_TENANT = "tenant="
_OPERATOR = "operator"


def read_keys(text: str) -> Mapping[bytes, Caller]:
    """What each key is good for, by its digest. Raises ConfigError: it names the line, and tells no key."""
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not (words := line.split()):
            continue
        key, caller = digest(words[0]), _caller(words[1:], f"line {number}")
        if callers.setdefault(key, caller) != caller:
            raise ConfigError(f"line {number} has a key that is another's, too")
    return callers


def num_unbound(callers: Collection[Caller]) -> int:
    """How many keys may act as whichever tenant, though others of the file belong to one: an oversight, most
    often. An operator's key is meant to."""
    if all(caller.tenant is None for caller in callers):
        return 0
    return sum(caller.tenant is None and not caller.is_operator for caller in callers)


def digest(key: str) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key.encode()).digest()


def _caller(words: list[str], where: str) -> Caller:
    tenants = [word.removeprefix(_TENANT) for word in words if word.startswith(_TENANT)]
    others = [word for word in words if not word.startswith(_TENANT)]
    if len(tenants) > 1 or others not in ([], [_OPERATOR]):
        raise ConfigError(f"{where} must be KEY [{_TENANT}NAME] [{_OPERATOR}]")
    tenant = tenants[0] if tenants else None
    if tenant is not None and not (tenant and is_id(tenant)):
        raise ConfigError(f"{where}: a tenant's name has 1 to {MAX_ID_CHARS} printable characters")
    return Caller(tenant, is_operator=bool(others))
