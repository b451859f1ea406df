"""NIXL must not read a page before it is written: SGLang's early send of a cached prefix says when that is by
an event, which its NIXL backend drops.

The early send is off (tests/engine/sglang/service/launch/test_settings.py), and our manager keeps such
an event and waits for it where the write is posted. That is held here with SGLang's own classes, in a process
such as it starts.
"""

import os
import subprocess
import sys

from engine.sglang.settings import sglang_settings
from services.values.rank import Role

SCRIPT = """
import threading
from sglang.srt.disaggregation.nixl.conn import NixlKVManager
from sglang.srt.environ import envs
from services.engine.sglang.inside.manager import IsthmusKVManager

assert envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX.get() is False
order = []

class Event:
    def synchronize(self):
        order.append("written")

def queued(self, room, *args, **kwargs):
    order.append(f"queued {room}")

def posted(self, peer, indices, *args):
    order.append(f"posted {indices}")

NixlKVManager.add_transfer_request = queued
NixlKVManager.send_kvcache = NixlKVManager.send_kvcache_slice = posted
for send in (IsthmusKVManager.send_kvcache, IsthmusKVManager.send_kvcache_slice):
    manager = object.__new__(IsthmusKVManager)
    manager._unwritten, manager._posting = {}, threading.local()
    manager._posting.room = 9
    manager._count = lambda *args: None
    manager.add_transfer_request(9, [1], slice(0, 1), False, wait_event=Event())
    manager.add_transfer_request(9, [2], slice(1, 2), True, wait_event=None)
    manager.add_transfer_request(8, [3], slice(0, 1), False, wait_event=Event())
    send(manager, "peer", [1], [4])
    send(manager, "peer", [2], [5])
assert order == ["queued 9", "queued 9", "queued 8", "written", "posted [1]", "posted [2]"] * 2, order
"""


def test_a_page_is_posted_only_once_it_is_written(checkpoint):
    settings = sglang_settings(checkpoint, role=Role.PREFILL)
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=settings.environment(os.environ),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr[-3000:]
