"""gRPC's threads wait until the loop sleeps, and others keep their policy."""

import os
import subprocess
import sys
import threading

import pytest

from net.policies import may_choose
from services.net.poller import _patient_threads

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
chooses = pytest.mark.skipif(
    not may_choose(), reason="this process may not choose how its threads are scheduled"
)


@chooses
def test_it_waits_for_the_loop_and_serves_all_servers_and_channels():
    """In a process of its own: gRPC starts its threads once."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.returncode) == ("done\n", 0), ran.stderr


def policy_of_a_new_thread():
    """And of one that it starts."""
    policies = []

    def look():
        policies.append(os.sched_getscheduler(0))

    def run():
        look()
        second = threading.Thread(target=look)
        second.start()
        second.join()

    first = threading.Thread(target=run)
    first.start()
    first.join()
    return policies


def in_a_thread(work):
    """What a test chooses is that thread's."""
    raised = []

    def run():
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@chooses
def test_threads_that_start_within_wait_for_others():
    def work():
        with _patient_threads():
            assert policy_of_a_new_thread() == [os.SCHED_BATCH] * 2
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        assert policy_of_a_new_thread() == [os.SCHED_OTHER] * 2
        with pytest.raises(ZeroDivisionError), _patient_threads():
            raise ZeroDivisionError
        assert os.sched_getscheduler(0) == os.SCHED_OTHER

    in_a_thread(work)


@chooses
def test_another_policy_stays():
    def work():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with _patient_threads():
            assert policy_of_a_new_thread() == [os.SCHED_IDLE] * 2
        assert os.sched_getscheduler(0) == os.SCHED_IDLE

    in_a_thread(work)


def test_where_it_may_not_choose_nothing_changes(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with _patient_threads():
        assert policy_of_a_new_thread() == [os.SCHED_OTHER] * 2
