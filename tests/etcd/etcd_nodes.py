"""Three etcd members on this machine, any of which a test may kill and start again."""

import shutil
from pathlib import Path

from bench import etcd_nodes
from etcd.real_etcd import FAST


class EtcdNodes(etcd_nodes.EtcdNodes):
    """With short elections.

    One of them is stopped, not killed: etcd 3.5.1, all that PyPI has, may lose what a member that is killed
    had applied, and the mirrors of two routers then disagree for ever (services/etcd/etcd_client.py).
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FAST)

    async def wipe(self) -> None:
        """They found a new etcd, with nothing in it."""
        await self.kill_all()
        for node in self.nodes:
            shutil.rmtree(node.log_path.parent)
        await self.start_all()
