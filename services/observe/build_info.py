"""isthmus_build_info tells what a process is made of; Prometheus joins it to
all else that the process says.
"""

import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

from prometheus_client import CollectorRegistry, Info

# Each label has its distributions, of which the first that is installed counts: NIXL's comes by the version
# of CUDA.
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
    """Read versions from what is installed beside us; nothing is imported, for torch takes seconds."""
    return {label: next(_installed(names), "none") for label, names in _DISTRIBUTIONS.items()}


def _installed(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            yield metadata.version(name)
