"""What NIXL is to move KV with. Needs no NIXL."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.host.ports import is_loopback
from services.values.errors import ConfigError
from services.values.kv_path import KvPath, KvPathKind

log = logging.getLogger(__name__)

UCX = "UCX"
_DEVICES = "UCX_NET_DEVICES"
_LOOPBACK = "lo"  # Linux's name of it; memory that two processes of one host share is no such device


@dataclass(frozen=True, slots=True)
class NixlSettings:
    backend: str = UCX
    parameters: dict[str, str] = field(default_factory=dict)  # of that backend
    expects_rdma: bool = False
    writes: bool = False  # UCX's log is then read by us

    def tell(self, path: KvPath) -> None:
        """A line of our log, at the first write that went so."""
        is_slow = self.expects_rdma and path.kind is KvPathKind.TCP
        said = "expected=rdma" if self.expects_rdma else "expected=any"
        log.log(
            logging.WARNING if is_slow else logging.INFO,
            "kv_path kind=%s reach=%s lanes=%r %s",
            path.kind,
            path.reach or "unknown",
            path.lanes,
            said,
        )


def keep_to_loopback(host: str) -> None:
    """Where `host` is loopback, have UCX listen there alone, in this process and in those that it starts: by
    itself its TCP listens on every interface, and it asks nobody who he is. Who names devices has them.

    To be called while there is one thread, as ucx_log.py says, and before UCX is loaded.
    """
    if is_loopback(host):
        os.environ.setdefault(_DEVICES, _LOOPBACK)


def parameters_of(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, each name once. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in found:
            raise ConfigError(f"--nixl-parameter={text}: {name} is given twice")
        found[name] = value
    return found
