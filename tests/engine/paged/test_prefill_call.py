"""A Prefill call that is cancelled in the very turn of the loop in which its token comes."""

import asyncio

import pytest

from services.engine.paged.events import Reserved, Token
from services.engine.paged.shell.legs import both
from services.engine.paged.shell.prefill import _Computed

TOLD = (Reserved(0, (), 0.0), Token(7, None, None))


async def test_a_token_that_meets_the_cancellation_of_its_request_is_no_error():
    """A caller's cancellation ends the leg that it waits for at once, and the others a turn later."""
    computed, mailbox = _Computed(), asyncio.Queue()

    async def call():
        never = asyncio.get_running_loop().create_future()
        await both(computed.wait(), _forever(never), computed.attend(mailbox))

    calling = asyncio.create_task(call())
    for _ in range(5):
        await asyncio.sleep(0)
    for event in TOLD:
        mailbox.put_nowait(event)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_what_is_computed_is_told_to_the_end():
    computed, mailbox = _Computed(), asyncio.Queue()
    for event in TOLD:
        mailbox.put_nowait(event)
    assert (await both(computed.wait(), _at_once(), computed.attend(mailbox)))[0] == TOLD


async def _forever(never):
    return await never


async def _at_once():
    return None
