"""KV crosses from a prefill rank to decode ranks by such a path."""

from dataclasses import dataclass
from enum import StrEnum


class KvPathKind(StrEnum):
    RDMA = "rdma"
    TCP = "tcp"
    CUDA_IPC = "cuda_ipc"  # It goes from GPU to GPU of one node, over NVLink or PCIe.
    SHARED_MEMORY = "shared_memory"  # It goes between processes of one host, by the kernel's copies too.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KvPath:
    """A transport has chosen it for writes to some of its peers; `lanes` are in its own words."""

    kind: KvPathKind
    reach: str  # It is intra-node or inter-node, and empty where it is not known.
    lanes: str  # It reads like rc_mlx5/mlx5_0:1, or 52% on tcp/lo and 48% on tcp/eth0.
