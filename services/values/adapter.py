"""An adapter changes what a model computes, and so the KV of a prompt: nothing computed with one may serve
the model alone, or another adapter.
"""

import re
from dataclasses import dataclass

from services.values.errors import InvalidRequest

NAME_FORM = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_NAME = re.compile(NAME_FORM)
_DIGEST = re.compile(r"[0-9a-f]{32}")
# Salts of clients have printable characters alone, so that no salt is taken for another one with an adapter.
_MARK = "\x1f"


@dataclass(frozen=True, slots=True, order=True)
class Adapter:
    """`digest` names the weights and how they are scaled, in 32 hexadecimal digits."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        if not is_name(self.name) or not _DIGEST.fullmatch(self.digest):
            raise InvalidRequest(f"not an adapter: {self.name!r} with digest {self.digest!r}")

    def __str__(self) -> str:
        return f"{self.name}@{self.digest[:8]}"


def kv_scope(cache_salt: str, adapter: Adapter | None) -> str:
    """Return what separates KV: the salt itself without an adapter, else one that no client can send."""
    if adapter is None:
        return cache_salt
    return _MARK.join((cache_salt, adapter.name, adapter.digest))


def is_name(name: str | None) -> bool:
    return name is not None and _NAME.fullmatch(name) is not None


def model_and_adapter(model: str, base: str) -> str | None:
    """Return the name of the adapter in `base:name`, "" for `base` alone and for "", else None."""
    if model in ("", base):
        return ""
    name = model.removeprefix(f"{base}:")
    return name if name != model and name else None
