"""These tests show what SGLang's processes tell the service, over a real Unix socket."""

import asyncio
import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.sglang import reports
from services.engine.sglang.directory import directory_from_proto, directory_to_proto
from services.engine.sglang.inside.reporter import Reporter
from services.engine.sglang.reports import (
    Abort,
    Active,
    Generate,
    Moved,
    Outputs,
    PathFound,
    TicketSent,
    TreeEvents,
    draft_fields,
    draft_of,
    encode,
    group_fields,
    group_of,
    pack_ids,
    unpack_ids,
)
from services.engine.sglang.service.process_connections import serve_reports
from services.values.errors import InvalidRequest
from services.values.kv import DraftKv, GroupKind, KvGroup
from services.values.rank import Generation, RankId

WINDOW = KvGroup(GroupKind.SLIDING_WINDOW, (0, 2), 2, 16, "bfloat16", window=32, unit_bytes=4096)
ACTIVE = Active(
    role="prefill",
    dp_rank=1,
    tp_rank=0,
    cp_rank=0,
    pp_rank=0,
    tp_size=1,
    pid=7,
    endpoint="10.0.0.1:4000",
    page_size=16,
    page_bytes=4096,
    num_pages=513,
    dtype="bfloat16",
    num_layers=2,
    state_kinds=["swa"],
    carried=[group_fields(WINDOW)],
    draft=draft_fields(DraftKv(5, WINDOW)),
    topology={"attn_tp_size": 1},
)


ORDERED = [Generate({"rid": "7", "input_ids": list(range(50_000))}), Abort("7")]


class Taken(list):
    """Reports, and how to answer who told the last one."""

    def take(self, report, say):
        self.append(report)
        self.say = say


async def test_reports_and_orders_come_whole_and_in_order(tmp_path):
    taken, path = Taken(), str(tmp_path / "reports")
    big = TreeEvents(1, [{"type": "BlockStored", "token_ids": list(range(50_000))}])
    said = [
        ACTIVE,
        TicketSent(2**62, 32, 3),
        Moved(2**62, 3, 12288, {"swa": 4096}),
        Outputs([{"rid": "7", "output_ids": [5, 6], "meta_info": {"finish_reason": None}}]),
        PathFound(1, "rdma", "inter-node", "rc_mlx5/mlx5_0:1"),
        big,
        *(Moved(n, 1, 1, {}) for n in range(99)),
    ]
    server = await serve_reports(path, taken.take, pytest.fail, lambda: None)
    try:
        reporter = Reporter(path)
        for report in said:
            reporter.report(report)
        async with asyncio.timeout(5):
            while len(taken) < len(said):
                await asyncio.sleep(0.005)
            for order in ORDERED:
                taken.say(order)
            orders = []
            while len(orders) < len(ORDERED):
                await asyncio.sleep(0.005)
                orders += reporter.orders()
    finally:
        server.close()
    assert taken == said
    assert orders == ORDERED
    assert group_of(taken[0].carried[0]) == WINDOW
    assert draft_of(taken[0].draft) == DraftKv(5, WINDOW) and draft_of(draft_fields(None)) is None


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_ids_come_as_they_were_packed(ids):
    assert unpack_ids(json.loads(json.dumps(pack_ids(tuple(ids))))) == array("q", ids)


async def test_an_order_that_no_scheduler_would_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "MAX_LINE_BYTES", 1000)
    taken, path = Taken(), str(tmp_path / "reports")
    server = await serve_reports(path, taken.take, pytest.fail, lambda: None)
    try:
        reporter = Reporter(path)
        reporter.report(Moved(1, 1, 1, {}))
        async with asyncio.timeout(5):
            while not taken:
                await asyncio.sleep(0.005)
            with pytest.raises(InvalidRequest, match="1000 bytes"):
                taken.say(Generate({"sampling_params": {"ebnf": "\n" * 600}}))
            taken.say(Abort("7"))
            while not (orders := reporter.orders()):
                await asyncio.sleep(0.005)
    finally:
        server.close()
    assert orders == [Abort("7")]


async def test_ends_of_processes(subtests, tmp_path):
    with subtests.test("the end of a process is noticed"):
        taken, ended, path = Taken(), asyncio.Event(), str(tmp_path / "reports")
        server = await serve_reports(path, taken.take, pytest.fail, ended.set)
        async with asyncio.timeout(5):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(encode(Moved(1, 1, 1, {})))
            await writer.drain()
            writer.close()
            await ended.wait()
        server.close()
        assert taken == [Moved(1, 1, 1, {})]
    with subtests.test("half a line of a process that was killed is its end"):
        taken, ended, path = Taken(), asyncio.Event(), str(tmp_path / "reports")
        server = await serve_reports(path, taken.take, pytest.fail, ended.set)
        async with asyncio.timeout(5):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(encode(Moved(1, 1, 1, {})) + encode(Moved(2, 1, 1, {}))[:20])
            await writer.drain()
            writer.close()
            await ended.wait()
        server.close()
        assert taken == [Moved(1, 1, 1, {})]


async def test_a_line_that_is_no_report_is_told_and_the_next_one_taken(subtests, tmp_path, monkeypatch):
    for line in [
        b"\n",
        b"[]\n",
        b"7\n",
        b"{\n",
        b"\xff\n",
        b'{"kind": "Gone"}\n',
        b'{"kind": "Moved", "transfer_id": 1}\n',
        b'{"kind": []}\n',
        b"x" * 3000 + b"\n",  # longer than a line may be
    ]:
        with subtests.test(line=line):
            monkeypatch.setattr(reports, "MAX_LINE_BYTES", 1000)
            taken, errors, ended, path = Taken(), [], asyncio.Event(), str(tmp_path / "reports")
            server = await serve_reports(path, taken.take, errors.append, ended.set)
            async with asyncio.timeout(5):
                _, writer = await asyncio.open_unix_connection(path)
                writer.write(line + encode(Moved(1, 1, 1, {})) + encode(Moved(2, 1, 1, {})))
                await writer.drain()
                writer.close()
                await ended.wait()
            server.close()
            assert (
                errors and Moved(2, 1, 1, {}) in taken
            )  # of a line that is too long the rest may swallow the next


def test_a_directory_survives():
    rank = RankId("p", 1, Generation(9))
    directory = directory_from_proto(directory_to_proto([ACTIVE], {1: rank}))
    assert directory.endpoints == {(1, 0, 0, 0): "10.0.0.1:4000"}
    assert directory.topology == ACTIVE.topology
