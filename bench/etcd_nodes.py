"""Three etcd members on this machine, any of which may be killed and started again."""

import asyncio
from pathlib import Path
from typing import Self

from services.etcd.embedded import EmbeddedEtcd
from services.host.ports import free_ports

NUM_NODES = 3


class EtcdNodes:
    """`async with EtcdNodes(folder) as nodes`: all three run, and have a leader."""

    def __init__(self, folder: Path, extra_arguments: tuple[str, ...] = ()) -> None:
        ports = free_ports("127.0.0.1", 2 * NUM_NODES)
        peers = ports[NUM_NODES:]
        cluster = ",".join(f"n{number}=http://127.0.0.1:{port}" for number, port in enumerate(peers))
        self.nodes = [
            EmbeddedEtcd(
                folder / f"n{number}",
                client_port=ports[number],
                peer_port=peers[number],
                extra_arguments=(*extra_arguments, f"--name=n{number}", f"--initial-cluster={cluster}"),
            )
            for number in range(NUM_NODES)
        ]

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(node.endpoint for node in self.nodes)

    async def __aenter__(self) -> Self:
        try:
            await self.start_all()
        except BaseException:
            await self.kill_all()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.kill_all()  # stopping gently, the last two would wait for a leader

    async def start_all(self) -> None:
        # Together: none has a leader before the second one is there.
        await asyncio.gather(*(node.start() for node in self.nodes))

    async def kill_all(self) -> None:
        await asyncio.gather(*(node.kill() for node in self.nodes))
