"""Backups of an etcd, taken and restored with its own tools as an operator does."""

import asyncio
import shutil
from pathlib import Path

from services.etcd.embedded import EmbeddedEtcd, etcd_binary


async def save(server: EmbeddedEtcd, backup: Path) -> None:
    await _run("etcdctl", f"--endpoints={server.endpoint}", "snapshot", "save", str(backup))


async def restore(server: EmbeddedEtcd, backup: Path) -> None:
    """The server, which is stopped, has only what the backup has once it starts again."""
    data = server.log_path.parent / "etcd"
    shutil.rmtree(data)
    await _run("etcdutl", "snapshot", "restore", str(backup), f"--data-dir={data}")


async def _run(tool: str, *arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        etcd_binary().parent / tool,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
