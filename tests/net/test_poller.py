"""In a process of its own: gRPC starts its threads once."""

import subprocess
import sys

import pytest

from host.policies import may_choose

SCRIPT = """
import asyncio, os
from services.net import channels, poller, servers

def threads():
    return {int(tid) for tid in os.listdir("/proc/self/task")}

async def main():
    before = threads()
    poller.start()
    started = threads() - before
    assert started and {os.sched_getscheduler(tid) for tid in started} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    server = await servers.open_server("127.0.0.1:0", lambda made: None, [])
    async with channels.open_channel(f"127.0.0.1:{server.port}") as channel:
        await channel.channel_ready()
    names = [open(f"/proc/self/task/{tid}/comm").read() for tid in threads() - before]
    assert names.count(open("/proc/self/comm").read()) == 1, names  # it is the poller of all
    await server.stop()

asyncio.run(main())
print("done")
"""


@pytest.mark.skipif(not may_choose(), reason="this process may not choose how its threads are scheduled")
def test_it_waits_for_the_loop_and_serves_all_servers_and_channels():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.returncode) == ("done\n", 0), ran.stderr
