"""Three etcd members on this machine, any of which a test may kill and start again."""

from pathlib import Path

from bench import etcd_nodes
from etcd.real_etcd import FAST


class EtcdNodes(etcd_nodes.EtcdNodes):
    """With short elections."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FAST)
