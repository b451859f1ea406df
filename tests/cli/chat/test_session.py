"""Stopping an answer."""

import asyncio

import pytest

from cli.chat.test_conversation import conversation
from services.cli import chat as sessions
from services.cli.chat import Session
from services.cli.chat_terminal import Plain
from services.net import channels
from services.wire.isthmus.v1 import generation_pb2

pytestmark = pytest.mark.long


async def never():
    await asyncio.get_running_loop().create_future()


@pytest.fixture
async def session(monkeypatch):
    """With a router that neither answers nor aborts."""

    async def responses(*arguments, **fields):
        yield generation_pb2.GenerateResponse(text="Hi", token_ids=[1])
        await never()

    monkeypatch.setattr(sessions, "responses", responses)
    async with channels.open_channel("127.0.0.1:1") as channel:
        yield Session(channel, conversation(), Plain(), "127.0.0.1:1", 5.0)


async def test_interrupts(subtests, session, monkeypatch):
    with subtests.test("an interrupt between turns does nothing"):
        session.interrupt()
        assert session._abort is None
    with subtests.test("a second interrupt leaves whatever the router does"), monkeypatch.context() as patch:
        asked = asyncio.Event()

        async def send_abort(session):
            asked.set()
            await never()

        patch.setattr(Session, "_send_abort", send_abort)
        turn = asyncio.create_task(session.turn("Hello"))
        await asyncio.sleep(0)
        session.interrupt()
        await asked.wait()
        assert not turn.done()
        session.interrupt()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert not session.conversation.turns
