"""A Prefill call that is cancelled in the very turn of the loop in which its token comes."""

import asyncio

import pytest

from services.engine.paged.core_events import Reserved, Token
from services.engine.paged.shell.prefill_engine import _Computed
from services.transfer.waits import both

TOLD = (Reserved(0, ()), Token(7, None, None))


async def test_a_call_ends_with_its_token_or_its_cancellation(subtests):
    with subtests.test("a token that meets the cancellation of its request is no error"):
        # A caller's cancellation ends the leg that it waits for at once, and the others a turn later.
        computed, mailbox = _Computed(nothing_pulled), asyncio.Queue()

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

    with subtests.test("what is computed is told to the end"):
        computed, mailbox = _Computed(nothing_pulled), asyncio.Queue()
        for event in TOLD:
            mailbox.put_nowait(event)
        (_, token), _ = await both(computed.wait(), _at_once(), computed.attend(mailbox))
        assert token == TOLD[1]


async def nothing_pulled(mailbox, reserved):
    return None


async def _forever(never):
    return await never


async def _at_once():
    return None
