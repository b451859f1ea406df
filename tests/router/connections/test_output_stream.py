"""These tests show what is read of one request when."""

import asyncio
from types import SimpleNamespace

import pytest

from services.router.connections.output_stream import OutputStream
from services.values.errors import DeadlineExceeded, PeerFailed
from services.values.request import FinishReason, Output, TokenLogprobs


def output(*token_ids, finished=None, admitted=None):
    return Output(
        token_ids, tuple(TokenLogprobs(token_id, -1.0) for token_id in token_ids), admitted, finished
    )


async def test_what_has_come_meanwhile_is_read_at_once_and_an_error_after_it():
    stream = OutputStream(Closed(), "a")
    first = output(1, admitted=object())
    for item in (first, output(2, 3), output(4), output(finished=FinishReason.ABORTED)):
        stream.put(item)
    assert await stream.next(all_at_once=True) is first
    assert len(stream._items) == 3
    whole = await stream.next(all_at_once=True)
    assert (whole.token_ids, len(whole.logprobs)) == ((2, 3, 4), 3)
    assert (whole.admitted, whole.finished) == (None, FinishReason.ABORTED)
    assert not stream._items
    for item in (output(4), output(5), PeerFailed("lost")):
        stream.put(item)
    assert (await stream.next()).token_ids == (4,)
    assert (await stream.next(all_at_once=True)).token_ids == (5,)
    with pytest.raises(PeerFailed):
        await stream.next(all_at_once=True)
    waiting = asyncio.create_task(stream.next(all_at_once=True))
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.put(output(6))
    assert (await waiting).token_ids == (6,)


async def test_a_deadline_ends_the_stream_unless_it_is_closed(subtests):
    with subtests.test("the deadline ends the stream behind what has come and the request at the rank"):
        aborted, forgotten = [], []
        client = SimpleNamespace(send_abort=aborted.append, forget=forgotten.append)
        stream = OutputStream(client, "a", timeout_s=0.0)
        stream.put(output(1))
        assert (await stream.next()).token_ids == (1,)
        async with asyncio.timeout(20):
            with pytest.raises(DeadlineExceeded):
                await stream.next(all_at_once=True)
        assert aborted == []
        stream.close()
        assert aborted == forgotten == ["a"]
    with subtests.test("who is closed has no deadline"):
        stream = OutputStream(SimpleNamespace(send_abort=print, forget=print), "a", timeout_s=0.0)
        stream.close()
        await asyncio.sleep(0)
        assert not stream._items


class Closed:
    def send_abort(self, request_id):
        raise AssertionError("the request has ended")

    def forget(self, request_id):
        pass


async def test_tokens_that_came_alone(subtests):
    with subtests.test("tokens that came alone are one output before what came behind them"):
        stream = OutputStream(Closed(), "a")
        for token_id in (1, 2):
            stream.put_token(token_id, 0.0)
        stream.put(output(3))
        for token_id in (4, 5):
            stream.put_token(token_id, 0.0)
        read = [await stream.next() for _ in range(3)]
        assert [each.token_ids for each in read] == [(1, 2), (3,), (4, 5)]
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.put_token(6, 0.0)
        assert (await waiting).token_ids == (6,)
        stream.put_token(7, 0.0)
        stream.put(PeerFailed("lost"))
        assert (await stream.next(all_at_once=True)).token_ids == (7,)
        with pytest.raises(PeerFailed):
            await stream.next()
    with subtests.test("the first output is read alone though tokens have come behind it"):
        stream = OutputStream(Closed(), "a")
        first = output(1, admitted=object())
        stream.put(first)
        stream.put_token(2, 0.0)
        assert await stream.next(all_at_once=True) is first
        assert (await stream.next(all_at_once=True)).token_ids == (2,)
