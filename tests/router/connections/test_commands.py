"""These tests show what is written to a decode rank, of commands as they come."""

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.router.connections import rank_connections
from services.router.connections.rank_connections import Commands
from services.wire.isthmus.v1 import decode_pb2

NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=200)
# Commands that come while one message is written.
ROUNDS = st.lists(st.lists(NAMES, min_size=1, max_size=9), max_size=6)


def command(name):
    return decode_pb2.Command(abort=decode_pb2.AbortCommand(request_id=name)).SerializeToString()


def names_in(message):
    first = decode_pb2.Command.FromString(message)
    assert not any(further.further for further in first.further)
    return [each.abort.request_id for each in (first, *first.further)]


async def written(rounds, joins):
    """The names in each message, where a round's commands come together."""
    waiting, messages = Commands(), []
    waiting.joins = joins
    for names in rounds:
        for name in names:
            waiting.put(command(name))
        messages.append(names_in(await waiting.message()))
    while waiting._waiting:
        messages.append(names_in(await waiting.message()))
    return messages


@given(ROUNDS)
def test_those_of_a_moment_go_in_one_in_their_order_to_a_rank_that_reads_that(rounds):
    assert asyncio.run(written(rounds, joins=True)) == rounds
    assert asyncio.run(written(rounds, joins=False)) == [[name] for names in rounds for name in names]


@given(st.lists(NAMES, min_size=1, max_size=30), st.integers(1, 400), st.integers(1, 9))
def test_no_more_are_joined_than_a_message_is_to_hold(names, most_bytes, most):
    bounds = rank_connections._MOST_JOINED_BYTES, rank_connections._MOST_JOINED
    rank_connections._MOST_JOINED_BYTES, rank_connections._MOST_JOINED = most_bytes, most
    try:
        messages = asyncio.run(written([names], joins=True))
    finally:
        rank_connections._MOST_JOINED_BYTES, rank_connections._MOST_JOINED = bounds
    assert [name for message in messages for name in message] == names
    for message, following in pairwise(messages):
        size = sum(len(command(name)) for name in message)
        assert len(message) == 1 or (size <= most_bytes and len(message) <= most)
        assert len(message) == most or size + len(command(following[0])) > most_bytes


async def test_who_waits_is_woken_by_the_first():
    waiting = Commands()
    reading = asyncio.create_task(waiting.message())
    await asyncio.sleep(0)
    waiting.put(command("one"))
    assert names_in(await asyncio.wait_for(reading, 10)) == ["one"]
    reading = asyncio.create_task(waiting.message())
    await asyncio.sleep(0)
    assert not reading.done()
    reading.cancel()
