"""These tests show what one router's stream makes of what an engine yields and tells."""

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from services.decode.decode_service import AttachSession, RunningRequests
from services.decode.prefill_leg import PrefillChannels
from services.net import grpc_errors
from services.rank.intake import Intake
from services.rank.rank_metrics import DecodeMetrics
from services.values.errors import ProtocolError, RankLeaves
from services.values.rank import Plan, RankId
from services.values.rank_reports import RankLoad
from services.values.request import Admitted, Output, SamplingParams
from services.wire import convert, convert_request
from services.wire.isthmus.v1 import common_pb2, decode_pb2

OWN_ID = RankId("d", 0, 1)
ADMITTED = Admitted(3, 0, 0, 3, 0, 0, 0.0, 0.0, 0.0, 0.0, Plan.LOCAL)
LONG_S = 60.0


class Engine:
    """Each request's steps are put into `steps`: a token alone, which is told, or an output."""

    def __init__(self):
        self.steps: dict[str, asyncio.Queue[Output]] = {}
        self.tell = {}

    def load(self):
        return RankLoad(running=len(self.steps))

    async def generate(self, request, remote_prefill, tell):
        name = request.request_id
        self.steps[name], self.tell[name] = asyncio.Queue(), tell
        yield Output((1,), admitted=ADMITTED)
        while True:
            yield await self.steps[name].get()


@asynccontextmanager
async def attached(*numbers):
    """An engine that runs a request of each number, the messages to its router, and its metrics."""
    engine, registry = Engine(), CollectorRegistry()
    metrics = DecodeMetrics(registry, engine)
    session = AttachSession(
        engine, OWN_ID, PrefillChannels(None), RunningRequests(Intake(OWN_ID)), metrics, set()
    )
    for number in numbers:
        sampling = convert_request.sampling_to_proto(SamplingParams())
        start = decode_pb2.Start(
            request_id=f"r{number}",
            prompt_ids=[1, 2, 3],
            sampling=sampling,
            plan=common_pb2.PLAN_LOCAL,
            decode_generation=1,
            number=number,
        )
        session._start(start)
    async with aclosing(session.messages(LONG_S)) as messages:
        await anext(messages)  # which says hello
        first = await anext(messages)
        assert [list(output.token_ids) for output in first.outputs] == [[1]] * len(numbers)
        generated = lambda: registry.get_sample_value("isthmus_decode_generated_tokens_total")  # noqa: E731
        yield engine, messages, generated
        await session.close()


async def test_a_step_is_a_message(subtests):
    """Whether its tokens are told or yielded, and whichever comes first."""
    for told_first in [True, False]:
        with subtests.test(told_first=told_first):
            async with attached(1, 2, 3) as (engine, messages, generated):
                for _ in range(3):
                    said = [
                        lambda: engine.tell["r1"](7),
                        lambda: engine.steps["r2"].put_nowait(Output((8, 9), drafted_tokens=1)),
                        lambda: engine.tell["r3"](5),
                    ]
                    waiting = asyncio.ensure_future(anext(messages))
                    await asyncio.sleep(0)
                    for say in said if told_first else reversed(said):
                        say()
                    message = await waiting
                    tokens = zip(message.numbers, message.token_ids, strict=True)
                    assert sorted(tokens) == [(1, 7), (3, 5)]
                    assert [(o.request_id, list(o.token_ids)) for o in message.outputs] == [("r2", [8, 9])]
                assert generated() == 3 + 3 * 4
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await anext(messages)


async def test_a_token_that_was_taken_with_others_makes_no_message_of_its_own():
    async with attached(1, 2) as (engine, messages, _):
        engine.steps["r1"].put_nowait(Output((8, 9), drafted_tokens=1))
        await asyncio.sleep(0)
        engine.tell["r2"](7)
        message = await anext(messages)
        assert (list(message.outputs[0].token_ids), list(message.token_ids)) == ([8, 9], [7])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(messages)


async def test_what_nobody_takes_any_more_was_generated_all_the_same():
    async with attached(1) as (engine, _, generated):
        engine.tell["r1"](7)
        assert generated() == 1
    assert generated() == 2


def start(name, **others):
    return decode_pb2.Start(
        request_id=name,
        prompt_ids=[1, 2, 3],
        sampling=convert_request.sampling_to_proto(SamplingParams()),
        plan=common_pb2.PLAN_LOCAL,
        decode_generation=1,
        **others,
    )


@asynccontextmanager
async def reading(*commands):
    """An engine, and its router's session that has read these."""

    async def all_of_them():
        for command in commands:
            yield command

    engine = Engine()
    metrics = DecodeMetrics(CollectorRegistry(), engine)
    session = AttachSession(
        engine, OWN_ID, PrefillChannels(None), RunningRequests(Intake(OWN_ID)), metrics, set()
    )
    try:
        await session.read(all_of_them())
        yield engine, session
    finally:
        await session.close()


async def test_commands_behind_another_are_obeyed_in_their_order():
    command = decode_pb2.Command(
        start=start("a"),
        further=[
            decode_pb2.Command(start=start("b")),
            decode_pb2.Command(abort=decode_pb2.AbortCommand(request_id="a")),
            decode_pb2.Command(start=start("c")),
        ],
    )
    async with reading(command) as (engine, session), aclosing(session.messages(LONG_S)) as messages:
        first = await anext(messages)
        assert first.takes_further
        said = {}
        while len(said) < 3:
            for output in (await anext(messages)).outputs:
                said[output.request_id] = output
        assert set(engine.steps) == {"b", "c"}  # the first was aborted before it began
        assert said["a"].finished == common_pb2.FINISH_REASON_ABORTED
        assert list(said["b"].token_ids) == list(said["c"].token_ids) == [1]


async def test_only_the_first_message_says_what_the_rank_reads():
    async with attached(1) as (engine, messages, _):
        engine.tell["r1"](7)
        assert not (await anext(messages)).takes_further


async def test_what_is_no_command_behind_another_breaks_the_stream(subtests):
    for further in [
        decode_pb2.Command(),
        decode_pb2.Command(start=start("b"), further=[decode_pb2.Command(start=start("c"))]),
    ]:
        with subtests.test(further=further), pytest.raises(ProtocolError):
            async with reading(decode_pb2.Command(start=start("a"), further=[further])):
                pass


async def test_what_is_moved_is_not_aborted():
    command = decode_pb2.Command(start=start("a"))
    async with reading(command) as (_, session), aclosing(session.messages(LONG_S)) as messages:
        await anext(messages)
        assert list((await anext(messages)).outputs[0].token_ids) == [1]
        session._running.intake.move_all()
        (output,) = (await anext(messages)).outputs
        assert output.error.leaves and session._running.intake.num_running == 0
        assert isinstance(grpc_errors.error_from_request(output.error), RankLeaves)


async def test_what_one_router_sends_the_others_hear_of(subtests):
    """Each of two routers hears once of what the third one has started, and that one hears nothing."""
    sessions, engine, intake = set(), Engine(), Intake(OWN_ID)
    running, metrics = RunningRequests(intake), DecodeMetrics(CollectorRegistry(), engine)
    for _ in range(3):
        sessions.add(AttachSession(engine, OWN_ID, PrefillChannels(None), running, metrics, sessions))
    sender, *others = sessions
    coming = decode_pb2.Coming(rank=convert.rank_id_to_proto(OWN_ID), blocks=[5, 1 << 63], for_s=7.0)

    async def heard(session):
        async with aclosing(session.messages(LONG_S)) as messages:
            return list((await anext(messages)).coming)

    sender._start(start("a", coming=coming))
    for session, told in ((sender, []), *((other, [coming]) for other in others)):
        with subtests.test(sends=session is sender):
            assert await heard(session) == told
            assert await heard(session) == []
    with subtests.test("what is refused is told to nobody"):
        sender._start(start("a", coming=coming))  # It runs already.
        wrong = [{"for_s": -1.0}, {"blocks": [5, 5]}, {"blocks": range(4_097)}]
        for number, fields in enumerate(wrong):
            sender._start(start(f"e{number}", coming=decode_pb2.Coming(rank=coming.rank, **fields)))
        assert await heard(others[0]) == []
        assert not any(f"e{number}" in running for number in range(len(wrong)))
    with subtests.test("what has nothing to tell is told to nobody"):
        sender._start(start("b"))
        assert await heard(others[0]) == []
    with subtests.test("who does not read hears of the last ones alone"):
        for number in range(40):
            coming.for_s = number
            sender._start(start(f"c{number}", coming=coming))
        assert [each.for_s for each in await heard(others[0])] == list(range(8, 40))
    with subtests.test("who reads is woken"):
        async with aclosing(others[0].messages(LONG_S)) as messages:
            await anext(messages)
            sender._start(start("d", coming=coming))
            assert list((await anext(messages)).coming) == [coming]
    for session in sessions:
        await session.close()
