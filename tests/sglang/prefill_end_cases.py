"""Our prefill end beside SGLang's own class; test_inside.py runs them in a process of their own."""

import threading
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVSender
from sglang.srt.environ import envs

from services.engine.sglang.inside.kv_classes import IsthmusKVManager, IsthmusKVSender
from services.engine.sglang.inside.prefill_end import PrefillEnd


@pytest.mark.parametrize("send", ["send_kvcache", "send_kvcache_slice"])
def test_a_page_is_posted_only_once_it_is_written(send, monkeypatch):
    """SGLang's early send of a cached prefix says when that is by an event, which its NIXL backend drops.

    The early send is off (tests/engine/sglang/service/launch/test_sglang_settings.py), and our manager keeps
    such an event and waits for it where the write is posted.
    """
    assert envs.SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX.get() is False
    order = []

    def queued(manager, transfer_id, *args, **kwargs):
        order.append(f"queued {transfer_id}")

    def posted(manager, peer, indices, *args):
        order.append(f"posted {indices}")

    monkeypatch.setattr(NixlKVManager, "add_transfer_request", queued)
    monkeypatch.setattr(NixlKVManager, send, posted)
    event = SimpleNamespace(synchronize=lambda: order.append("written"))
    manager = object.__new__(IsthmusKVManager)
    manager._unwritten, manager._posting = {}, threading.local()
    manager._posting.transfer_id = 9
    manager._count = lambda *args: None
    manager.add_transfer_request(9, [1], slice(0, 1), False, wait_event=event)
    manager.add_transfer_request(9, [2], slice(1, 2), True, wait_event=None)
    manager.add_transfer_request(8, [3], slice(0, 1), False, wait_event=event)
    getattr(IsthmusKVManager, send)(manager, "peer", [1], [4])
    getattr(IsthmusKVManager, send)(manager, "peer", [2], [5])
    assert order == ["queued 9", "queued 9", "queued 8", "written", "posted [1]", "posted [2]"]


def test_the_thread_that_waits_for_messages_holds_up_no_end_of_its_process():
    """SGLang's own is no daemon; one day it may be, and ours can go."""
    told = threading.Event()

    def no_message():
        told.wait()
        raise SystemExit

    manager = object.__new__(IsthmusKVManager)
    manager.server_socket = SimpleNamespace(recv_multipart=no_message)
    try:
        (ours,) = started_by(manager._start_bootstrap_thread)
        (theirs,) = started_by(super(PrefillEnd, manager)._start_bootstrap_thread)
        assert (ours.daemon, theirs.daemon) == (True, False)
    finally:
        told.set()


@pytest.mark.parametrize("is_over", [True, False])
def test_what_was_posted_of_a_transfer_is_forgotten_with_its_request(is_over, monkeypatch):
    """Also where a client went away between two chunks: nobody concludes that."""
    manager = object.__new__(IsthmusKVManager)
    manager._posted, manager._unwritten, manager.request_status = {7: 1, 8: 2}, {7: (3,)}, {7: 0, 8: 0}
    sender = object.__new__(IsthmusKVSender)
    sender.kv_mgr, sender.bootstrap_room = manager, 7
    # It leaves a transfer that another sender has taken over.
    monkeypatch.setattr(
        NixlKVSender, "clear", lambda sender: is_over and manager.request_status.pop(sender.bootstrap_room)
    )
    sender.clear()
    assert (manager._posted, manager._unwritten) == (({8: 2}, {}) if is_over else ({7: 1, 8: 2}, {7: (3,)}))


def started_by(start):
    before = set(threading.enumerate())
    start()
    return set(threading.enumerate()) - before
