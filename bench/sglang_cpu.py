"""The CPU time of a system's processes, by what they are. Pure."""

from collections.abc import Mapping

# Of a command line or a process's title; the first that is in it counts.
_PARTS = (
    ("services.router", "router"),
    ("sglang::router", "router"),
    ("sglang_router", "router"),
    ("services.decode", "decode_service"),
    ("services.prefill", "prefill_service"),
    ("sglang::scheduler", "schedulers"),
    ("/etcd --name", "etcd"),
    ("sglang", "sglang_others"),  # its HTTP servers, DP controllers, detokenizers
)
PARTS = tuple(dict.fromkeys(part for _, part in _PARTS))


def part_of(name: str) -> str | None:
    return next((part for word, part in _PARTS if word in name), None)


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {part: after[part] - before[part] for part in PARTS}
