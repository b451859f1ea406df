"""What a worker cannot read of SGLang's events never ends it, and the index is told of nothing unsure."""

import asyncio
import logging

from engine.sglang.stand_in import OWN, PAGE, active, tell, worker_on
from services.engine.sglang.reports import TreeEvents
from services.engine.sglang.service.engine import SglangDecodeEngine
from services.kv.block_hash import pair_hashes, scope_seed, sequence_hashes
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
PAIRS = [stored([[token, token + 1] for token in range(PAGE)])]


async def test_events_that_cannot_be_read_are_counted_and_logged_once_of_each_kind(checkpoint, caplog):
    async with worker_on(None, checkpoint) as worker:
        for events in (TREE, PAIRS, PAIRS, [{"type": "BlockMoved"}], TREE):
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


async def test_a_tree_says_itself_that_its_keys_are_pairs(checkpoint):
    async with worker_on(None, checkpoint) as worker:
        engine = SglangDecodeEngine(worker, OWN)
        assert not engine.tells_pairs
        tell(
            worker, active(keys_are_pairs=True), TreeEvents(0, PAIRS), active(tp_rank=1, keys_are_pairs=True)
        )
        blocks = tuple(pair_hashes(list(range(PAGE + 1)), PAGE, scope_seed("m")))
        assert worker.events[0].get_nowait() == CacheEvents(blocks)
        assert engine.tells_pairs and worker.load(0).unreadable_events == 0
        tell(worker, TreeEvents(0, TREE))
        assert worker.events[0].get_nowait() == CacheEvents(cleared=True)
        assert worker.load(0).unreadable_events == 1


async def test_a_report_that_cannot_be_read_may_have_had_any_ranks_events(checkpoint):
    async with worker_on(None, checkpoint) as worker:
        tell(worker, TreeEvents(0, TREE))
        worker._take_unreadable(ProtocolError("a report is too long"))
        async with asyncio.timeout(SECONDS):
            assert (await worker.events[0].get()).stored
            assert (await worker.events[0].get()).cleared
        assert not worker.ending
        assert worker.load(0).unreadable_events == 1
