"""By what KV crosses from a prefill rank to decode ranks."""

from dataclasses import dataclass
from enum import StrEnum


class KvPathKind(StrEnum):
    RDMA = "rdma"
    TCP = "tcp"
    CUDA_IPC = "cuda_ipc"  # from GPU to GPU of one node, over NVLink or PCIe
    SHARED_MEMORY = "shared_memory"  # between processes of one host, by the kernel's copies too
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KvPath:
    """What a transport has chosen for writes to some of its peers; `lanes` in its own words."""

    kind: KvPathKind
    reach: str  # intra-node, inter-node; empty: not known
    lanes: str  # rc_mlx5/mlx5_0:1, or 52% on tcp/lo and 48% on tcp/eth0
