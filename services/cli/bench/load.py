"""Sessions are sent in one of two loops.

closed loop   so many sessions at a time, the next one when one has ended
open loop     each at its time, whatever still runs; with a concurrency, at most so many at a time
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing

from services.cli.bench.meter import Meter
from services.cli.bench.side import Counts, LoadRequest, LoadTarget
from services.cli.bench.workload import LoadSession
from services.values.errors import IsthmusError, PeerFailed

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


async def closed_loop(
    side: LoadTarget, sessions: Iterator[LoadSession], concurrency: int, meter: Meter
) -> None:
    async def one_at_a_time() -> None:
        for session in sessions:
            await converse(side, session, meter)

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(one_at_a_time())


async def open_loop(
    side: LoadTarget,
    sessions: Iterator[LoadSession],
    concurrency: int | None,
    meter: Meter,
    clock: Clock,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Send each session at its `at_s`. One that comes late does not delay those after it."""
    began_s, room = clock(), asyncio.Semaphore(concurrency) if concurrency else None

    async def in_turn(session: LoadSession) -> None:
        try:
            await converse(side, session, meter)
        finally:
            if room is not None:
                room.release()

    async with asyncio.TaskGroup() as clients:
        for session in sessions:
            assert session.at_s is not None, "a workload of an open loop says when"
            await sleep(max(0.0, began_s + session.at_s - clock()))
            if room is not None:
                await room.acquire()
            clients.create_task(in_turn(session))


async def converse(side: LoadTarget, session: LoadSession, meter: Meter) -> None:
    """Send all turns, one after another. A turn that fails ends it, counted by its error."""
    said: list[int] = []
    conversation = session.name if len(session.turns) > 1 else ""
    for turn, last in zip(session.turns, _is_last(len(session.turns)), strict=True):
        said += turn.token_ids
        answer = await _ask(side, LoadRequest(said, turn.output_len, conversation), meter)
        if answer is None:
            return
        if not answer and not last:
            raise PeerFailed("the server tells no token ids: conversations want return_token_ids there")
        said += answer


def _is_last(count: int) -> Iterator[bool]:
    return itertools.chain(itertools.repeat(False, count - 1), [True])


async def _ask(side: LoadTarget, asked: LoadRequest, meter: Meter) -> list[int] | None:
    """Return the answer's ids, as far as the server tells them; None where it failed."""
    request, answer, counts = meter.begin(), list[int](), Counts()
    try:
        async with aclosing(side.ask(asked)) as coming:  # type: ignore[type-var]
            async for came in coming:
                meter.note(request, came)
                answer += came.token_ids
                counts = came.counts or counts
        meter.end(request, counts)
    except (IsthmusError, TimeoutError) as error:
        meter.fail(error)
        return None
    except asyncio.CancelledError:
        meter.cut()
        raise
    return answer
