"""These settings choose how NIXL moves KV. This module does not import NIXL."""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.host.ports import is_loopback
from services.values.errors import ConfigError
from services.values.kv import KvPath, KvPathKind

log = logging.getLogger(__name__)

UCX = "UCX"
# The UCX plugin of nixl 1.5.1 reads these. Its getPluginParams lists only three, one of which it never reads.
_UCX_READS = (
    "device_list",
    "engine_config",
    "num_threads",
    "num_workers",
    "split_batch_size",
    "ucx_error_handling_mode",
    "ucx_num_device_channels",
)
_READ_NOWHERE = "ucx_devices"
_DEVICES = "UCX_NET_DEVICES"
_LOOPBACK = "lo"  # This is Linux's name. Shared memory between processes of one host needs no device.


@dataclass(frozen=True, slots=True)
class NixlSettings:
    backend: str = UCX
    parameters: dict[str, str] = field(default_factory=dict)  # These are the backend's.
    expects_rdma: bool = False
    writes: bool = False  # If so, we read UCX's log.

    def tell(self, path: KvPath) -> None:
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
    """Make UCX listen on loopback alone if `host` is loopback, here and in child processes.

    By itself UCX's TCP listens on every interface and accepts anyone. An operator's own UCX_NET_DEVICES
    stays.

    This must be called while there is one thread, as ucx_log.py explains, and before UCX is loaded.
    """
    if is_loopback(host):
        os.environ.setdefault(_DEVICES, _LOOPBACK)


def check_parameters(backend: str, parameters: Iterable[str], known: Iterable[str] = _UCX_READS) -> None:
    """Raise ConfigError for a name that the plugin never reads: NIXL accepts any name silently."""
    for name in parameters:
        if name == _READ_NOWHERE:
            raise ConfigError(
                f"--nixl-parameter={name}=...: NIXL names this parameter and never reads it; device_list "
                "says which devices, without their ports: device_list=mlx5_0,mlx5_1"
            )
        if name not in known:
            raise ConfigError(
                f"--nixl-parameter={name}=...: NIXL's plugin {backend} has no such parameter, but "
                f"{', '.join(sorted(known)) or 'none'}"
            )


def parameters_of(texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in found:
            raise ConfigError(f"--nixl-parameter={text}: {name} is given twice")
        found[name] = value
    return found
