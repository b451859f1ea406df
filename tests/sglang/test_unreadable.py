"""What a worker cannot read of SGLang's events never ends it, and the index is told of nothing unsure."""

import asyncio
import logging

from engine.sglang.stand_in import PAGE, tell, worker_on
from services.engine.sglang.reports import TreeEvents
from services.kv.block_hash import scope_seed, sequence_hashes
from services.values.errors import ProtocolError
from services.values.kv import CacheEvents

SECONDS = 60.0


def stored(tokens):
    return {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": PAGE,
    }


TREE = [stored(list(range(PAGE)))]
TORN = [stored([7, [7, 8]] * (PAGE // 2))]
PAIRS = [stored([[token, token + 1] for token in range(PAGE)])]


async def test_events_that_cannot_be_read_are_counted_and_logged_once_of_each_kind(checkpoint, caplog):
    async with worker_on(None, checkpoint) as worker:
        for events in (TREE, TORN, TORN, [{"type": "BlockMoved"}], TREE):
            tell(worker, TreeEvents(0, events))
        blocks = tuple(sequence_hashes(list(range(PAGE)), PAGE, scope_seed("m")))
        told = [worker.events[0].get_nowait() for _ in range(5)]
        nothing = CacheEvents()
        assert told == [
            CacheEvents(blocks),
            CacheEvents(cleared=True),
            nothing,
            nothing,
            CacheEvents(blocks),
        ]
        assert not worker.ending
        assert worker.load(0).unreadable_events == 3
    assert [record.levelno for record in caplog.records if "sglang_events_unreadable" in record.message] == [
        logging.ERROR
    ] * 2


async def test_trees_of_pairs_are_told_by_first_tokens(checkpoint):
    async with worker_on(None, checkpoint) as worker:
        tell(worker, TreeEvents(0, PAIRS))
        blocks = tuple(sequence_hashes(list(range(PAGE)), PAGE, scope_seed("m")))
        assert worker.events[0].get_nowait() == CacheEvents(blocks)
        assert worker.load(0).unreadable_events == 0


async def test_a_report_that_cannot_be_read_may_have_had_any_ranks_events(checkpoint):
    async with worker_on(None, checkpoint) as worker:
        tell(worker, TreeEvents(0, TREE))
        worker._take_unreadable(ProtocolError("a report is too long"))
        async with asyncio.timeout(SECONDS):
            assert (await worker.events[0].get()).stored
            assert (await worker.events[0].get()).cleared
        assert not worker.ending
        assert worker.load(0).unreadable_events == 1
