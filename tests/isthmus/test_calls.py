"""Both clients against a router that answers as it is told: retries, deadlines, leaving, closing."""

import asyncio
import sys
import threading

import pytest

import isthmus
from isthmus import AsyncClient, Client, Retries
from router.scripted_router import FOR_EVER, Pauses, ScriptedRouter, finished, said, serving
from services.router.api_keys import ApiKeys
from services.values import errors
from services.wire.isthmus.v1 import generation_pb2

HELLO = [said("Hel", 1), finished("lo", 2)]
GONE, FULL = errors.Unavailable("no rank"), errors.NoCapacity("full", 3.0)


class Blocking:
    """The blocking client, in a thread, as the asynchronous one is called."""

    def __init__(self, target, pauses, **settings):
        self.client = Client(target, sleep=pauses.sleep, clock=pauses.clock, chance=lambda: 0.0, **settings)

    async def call(self, name, *arguments, **options):
        return await asyncio.to_thread(getattr(self.client, name), *arguments, **options)

    async def first_piece(self, prompt):
        """And leave."""

        def read():
            for piece in self.client.stream(prompt):
                return piece

        return await asyncio.to_thread(read)

    async def close(self):
        self.client.close()

    def close_instead_of_sleeping(self):
        self.client._sleep = lambda seconds: self.client.close()

    async def say(self, conversation, text):
        return await asyncio.to_thread(conversation.say, text)


class Asynchronous:
    def __init__(self, target, pauses, **settings):
        self.client = AsyncClient(
            target, sleep=pauses.sleep_aio, clock=pauses.clock, chance=lambda: 0.0, **settings
        )

    async def call(self, name, *arguments, **options):
        return await getattr(self.client, name)(*arguments, **options)

    async def first_piece(self, prompt):
        async with self.client.stream(prompt) as stream:
            async for piece in stream:
                return piece

    async def close(self):
        await self.client.close()

    def close_instead_of_sleeping(self):
        async def close(seconds):
            await self.client.close()

        self.client._sleep = close

    async def say(self, conversation, text):
        return await conversation.say(text)


KINDS = [Blocking, Asynchronous]


async def test_what_fails_before_the_first_token_is_tried_again(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            router, pauses = ScriptedRouter(GONE, FULL, HELLO), Pauses()
            async with serving(router) as target:
                client = kind(target, pauses)
                answer = await client.call("generate", "Hi", request_id="mine")
                assert (answer.text, answer.token_ids, answer.finish_reason) == ("Hello", (1, 2), "stop")
                await client.close()
            assert [request.request_id for request in router.requests] == ["mine", "mine.2", "mine.3"]
            assert pauses.slept == [0.1, 3.0], "half of the first pause; then what the router asked for"


async def test_what_has_begun_is_not_tried_again(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            router, pauses = ScriptedRouter([said("Hel", 1), GONE], HELLO), Pauses()
            async with serving(router) as target:
                client = kind(target, pauses)
                with pytest.raises(isthmus.Unavailable, match="no rank"):
                    await client.call("generate", "Hi")
                await client.close()
            assert len(router.requests) == 1 and not pauses.slept


async def test_the_last_error_is_raised(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            router, pauses = ScriptedRouter(GONE, GONE, FULL), Pauses()
            async with serving(router) as target:
                client = kind(target, pauses, retries=Retries(attempts=3))
                with pytest.raises(isthmus.Overloaded, match="full") as raised:
                    await client.call("generate", "Hi")
                assert raised.value.retry_after_s == 3.0
                await client.close()
            assert len(router.requests) == 3


async def test_other_calls_are_tried_again_too(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            models = generation_pb2.ListModelsResponse(models=[generation_pb2.Model(id="m", decode_ranks=2)])
            router, pauses = ScriptedRouter(GONE, models), Pauses()
            async with serving(router) as target:
                client = kind(target, pauses)
                (model,) = await client.call("models")
                assert (model.id, model.decode_ranks) == ("m", 2) and len(pauses.slept) == 1
                await client.close()


async def test_a_pause_that_is_longer_than_the_time_is_not_made(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            router, pauses = ScriptedRouter(FULL, HELLO), Pauses()
            async with serving(router) as target:
                client = kind(target, pauses, timeout=2.0)
                with pytest.raises(isthmus.Overloaded):
                    await client.call("generate", "Hi")
                await client.close()
            assert router.deadlines[0] == pytest.approx(2.0, abs=0.5) and not pauses.slept


async def test_a_deadline(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            async with serving(ScriptedRouter([FOR_EVER])) as target:
                client = kind(target, Pauses())
                with pytest.raises(isthmus.DeadlineExceeded):
                    await client.call("generate", "Hi", timeout=0.05)
                await client.close()


async def test_leaving_stops_the_answer(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            router = ScriptedRouter([said("Hel", 1), FOR_EVER])
            async with serving(router) as target:
                client = kind(target, Pauses())
                assert (await client.first_piece("Hi")).text == "Hel"
                await asyncio.wait_for(router.ended.wait(), 10)
                assert router.running == 0
                await client.close()


async def test_closing_the_client_ends_its_calls(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            router = ScriptedRouter([said("Hel", 1), FOR_EVER])
            async with serving(router) as target:
                client = kind(target, Pauses())
                waiting = asyncio.create_task(client.call("generate", "Hi"))
                while not router.running:
                    await asyncio.sleep(0.01)
                await client.close()
                with pytest.raises(isthmus.Cancelled):
                    await waiting
                with pytest.raises(isthmus.Cancelled):
                    await client.call("models")


async def test_closing_the_client_ends_calls_that_would_be_tried_again(subtests):
    for kind in KINDS:
        for name, arguments in [("generate", ["Hi"]), ("models", [])]:
            with subtests.test(kind=kind, name=name):
                async with serving(ScriptedRouter(GONE, GONE)) as target:
                    client = kind(target, Pauses())
                    client.close_instead_of_sleeping()
                    with pytest.raises(isthmus.Cancelled):
                        await client.call(name, *arguments)


async def test_a_stream_that_was_closed_or_has_not_ended_is_no_answer(subtests):
    with subtests.test("a stream that was made before its client was closed"):
        async with serving(ScriptedRouter()) as target:
            client, aio = Client(target), AsyncClient(target)
            stream, stream_aio = client.stream("Hi"), aio.stream("Hi")
            client.close()
            await aio.close()
            with pytest.raises(isthmus.Cancelled):
                stream.read()
            with pytest.raises(isthmus.Cancelled):
                await stream_aio.read()
    with subtests.test("a stream that was closed before it was read"):
        script = [[said("Hel", 1), FOR_EVER]] * 2
        async with serving(ScriptedRouter(*script)) as target, AsyncClient(target) as aio:
            with Client(target) as client:
                stream, stream_aio = client.stream("Hi"), aio.stream("Hi")
                stream.close()
                stream_aio.close()
                with pytest.raises(isthmus.Cancelled):
                    await asyncio.to_thread(stream.read)
                with pytest.raises(isthmus.Cancelled):
                    await stream_aio.read()
    with subtests.test("what has not ended is no answer"):
        async with serving(ScriptedRouter([said("Hel", 1)])) as target, AsyncClient(target) as client:
            stream = client.stream("Hi")
            with pytest.raises(isthmus.IncompleteAnswer, match="has not begun"):
                _ = stream.answer
            with pytest.raises(isthmus.IncompleteAnswer, match="has not ended"):
                await stream.read()
            with pytest.raises(RuntimeError, match="read once"):
                await stream.read()


async def test_a_task_that_is_cancelled_is_cancelled():
    router = ScriptedRouter([said("Hel", 1), FOR_EVER])
    async with serving(router) as target, AsyncClient(target) as client:
        waiting = asyncio.create_task(client.generate("Hi"))
        while not router.running:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(router.ended.wait(), 10)


async def test_a_stream_is_closed_by_another_thread():
    router = ScriptedRouter([said("Hel", 1), FOR_EVER])
    async with serving(router) as target:
        with Client(target) as client:
            stream, begun = client.stream("Hi"), threading.Event()

            def read():
                for _ in stream:
                    begun.set()

            reading = asyncio.create_task(asyncio.to_thread(read))
            await asyncio.to_thread(begun.wait)
            stream.close()
            with pytest.raises(isthmus.Cancelled):
                await reading


async def test_threads_share_a_client():
    router = ScriptedRouter(*[HELLO] * 8)
    async with serving(router) as target:
        with Client(target) as client:
            answers = await asyncio.gather(*(asyncio.to_thread(client.generate, f"{i}") for i in range(8)))
    assert [answer.text for answer in answers] == ["Hello"] * 8
    assert {request.text for request in router.requests} == {f"{i}" for i in range(8)}


async def test_a_key_and_the_defaults_go_with_each_call(subtests, tmp_path):
    for kind in KINDS:
        with subtests.test(kind=kind):
            (tmp_path / "keys").write_text("secret\n")
            router = ScriptedRouter(HELLO, HELLO)
            async with serving(router, ApiKeys(tmp_path / "keys")) as target:
                for key in ("wrong", None):
                    client = kind(target, Pauses(), api_key=key)
                    with pytest.raises(isthmus.Unauthenticated):
                        await client.call("generate", "Hi")
                    await client.close()
                client = kind(target, Pauses(), api_key="secret", tenant="acme", model="m")
                await client.call("generate", "Hi")
                await client.call("generate", "Hi", tenant="other")
                await client.close()
            told = [(request.tenant, request.model) for request in router.requests]
            assert told == [("acme", "m"), ("other", "m")]


async def test_several_answers_come_apart(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            mixed = [said("a", 1), said("b", 2, index=1), finished("B", 3, index=1), finished("A", 4)]
            async with serving(ScriptedRouter(mixed)) as target:
                client = kind(target, Pauses())
                answers = await client.call("answers", "Hi", n=2)
                assert [(answer.index, answer.text, answer.token_ids) for answer in answers] == [
                    (0, "aA", (1, 4)),
                    (1, "bB", (2, 3)),
                ]
                await client.close()


async def test_a_turn_that_fails_was_not_said(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            router = ScriptedRouter(HELLO, errors.InvalidRequest("no"), HELLO)
            async with serving(router) as target:
                client = kind(target, Pauses())
                conversation = client.client.conversation("Be brief.", temperature=0)
                await client.say(conversation, "Hi")
                with pytest.raises(isthmus.InvalidRequest):
                    await client.say(conversation, "wrong")
                await client.say(conversation, "More")
                await client.close()
            first, _, last = router.requests
            assert [m.content for m in last.chat.messages] == ["Be brief.", "Hi", "Hello", "More"]
            assert list(last.chat.messages[2].token_ids) == [1, 2]
            assert first.conversation_id == last.conversation_id == conversation.id
            assert last.sampling.HasField("temperature")


def test_what_no_channel_can_be_opened_to(subtests):
    with subtests.test("a target is no url"), pytest.raises(isthmus.InvalidRequest, match="not a URL"):
        Client("http://localhost:8000")
    with (
        subtests.test("a key that no header can carry"),
        pytest.raises(isthmus.InvalidRequest, match="ASCII"),
    ):
        Client(api_key="schlüssel\n")


# A child of a process that has used a client is given one of its own, and goes on with its parent's.
FORKED = """
import os, sys
from isthmus import Client

client = Client(sys.argv[1])
assert client.generate("Hi").text == "Hello"
if (child := os.fork()) == 0:
    os._exit(Client(sys.argv[1]).generate("Hi").text + client.generate("Hi").text != "HelloHello")
sys.exit(os.waitpid(child, 0)[1])
"""


async def test_the_blocking_client_survives_a_fork():
    async with serving(ScriptedRouter(HELLO, HELLO, HELLO)) as target:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", FORKED, target, stderr=-1)
        _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, said.decode()[-2000:]
