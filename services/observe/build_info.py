"""isthmus_build_info reports the versions in a process; Prometheus can join it to the process's other
metrics.
"""

import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

from prometheus_client import CollectorRegistry, Info

# Each label has distributions, of which the first installed one counts: NIXL has one per version of CUDA.
_DISTRIBUTIONS = {
    "version": ("isthmus",),
    "torch": ("torch",),
    "sglang": ("sglang",),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
}


def register(registry: CollectorRegistry, engine: str) -> None:
    """Register the metric. `engine` computes in this process (torch, sglang, fake); a router has none."""
    info = Info(
        "isthmus_build", "1; the labels say which versions are installed, or none.", registry=registry
    )
    info.info({"engine": engine, "python": platform.python_version(), **versions()})


def versions() -> dict[str, str]:
    """Read the versions of installed distributions without importing them, since torch takes seconds."""
    return {label: next(_installed(names), "none") for label, names in _DISTRIBUTIONS.items()}


def _installed(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            yield metadata.version(name)
