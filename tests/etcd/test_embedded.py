import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from etcd.real_etcd import FAST, client, until
from services.etcd.embedded import EmbeddedEtcd
from services.values.errors import ConfigError


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_data_outlives_the_process(tmp_path: Path) -> None:
    for attempt in range(2):
        async with EmbeddedEtcd(tmp_path, extra_arguments=FAST) as server, client(server.endpoint) as etcd:
            assert await etcd.create(b"a", b"1") == (attempt == 0)
            assert server._process is not None
            pid = server._process.pid
        assert not is_running(pid)
    assert server.log_path.exists()


async def test_why_it_did_not_start_is_said(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subtests.test("when it cannot start its last words are given"):
        server = EmbeddedEtcd(tmp_path, extra_arguments=("--no-such-flag",))
        with pytest.raises(ConfigError, match=r"did not start.*no-such-flag"):
            await server.start()
    with subtests.test("without the wheel the reason is given"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"install isthmus\[embedded\]"):
            await EmbeddedEtcd(tmp_path).start()


async def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, os, sys
        from pathlib import Path
        from services.etcd.embedded import EmbeddedEtcd
        async def main():
            server = EmbeddedEtcd(Path(sys.argv[1]), extra_arguments=tuple(sys.argv[2:]))
            await server.start()
            print(server._process.pid, flush=True)
            os._exit(9)
        asyncio.run(main())
        """
    )
    arguments = [sys.executable, "-c", program, str(tmp_path), *FAST]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=Path.cwd(), env=os.environ)
    assert done.returncode == 9, done.stderr
    await until(lambda: not is_running(int(done.stdout)))
