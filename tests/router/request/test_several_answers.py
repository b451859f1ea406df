"""These tests show how several answers wait for one another, and what each of them is to the ranks."""

import asyncio
from contextlib import aclosing
from unittest.mock import MagicMock

import pytest

from router.conftest import character_backend, save_tokenizer
from router.request.test_generation import LosingCluster
from router.request.test_parsed_answers import CALL, TEMPLATE, F, TalkingCluster, generator_of
from services.router.connections.output_stream import OutputStream
from services.router.connections.rank_connections import DecodeRankLost
from services.router.request.client_request import seed_of
from services.router.text.tokenizer import Tokenizer
from services.values.errors import NoCapacity, PeerFailed, Unavailable
from services.values.rank import Plan
from services.values.request import Admitted, FinishReason, Output
from services.wire.generation_messages import PackedIds
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest

ADMITTED = Admitted(1, 0, 0, 1, 0, 0, 0.0, 0.0, 0.0, 0.0, Plan.LOCAL)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(str(save_tokenizer(tmp_path_factory.mktemp("m"), character_backend(), TEMPLATE)))


class HeldCluster(LosingCluster):
    """Its ranks say what they are told to. `starts`: the answers that were sent to each, in order; ranks that
    are `refusing` take none in a second time."""

    def __init__(self):
        super().__init__(0)
        self.starts: list[tuple[str, str]] = []
        self.streams, self.seeds = {}, {}
        self.refusing, self.ended_keys, self.asked_room = set(), [], []

    def check_room(self, max_wait_s, answers=1):
        self.asked_room.append(answers)

    def place(self, prompt, conversation_id, excluded, max_wait_s):
        placed = super().place(prompt, conversation_id, excluded, max_wait_s)
        return self._starting(placed)

    def place_at(self, prompt, conversation_id, excluded, rank):
        if rank.worker in self.refusing:
            raise Unavailable("draining")
        placed = MagicMock(prefill=None, source=None, plan=Plan.LOCAL, coming=None)
        placed.decision.reason, chosen = "same_prompt", placed.decision.chosen
        chosen.prefill = chosen.source = None
        chosen.decode.hit_tokens = chosen.reused_tokens = 0
        chosen.decode.id = rank
        return self._starting(placed)

    def _starting(self, placed):
        worker = placed.decision.chosen.decode.id.worker

        def start(start, prompt):
            name = start.request_id
            self.starts.append((name, worker))
            self.seeds[name] = start.sampling.seed
            self.streams[name] = OutputStream(MagicMock(), name)
            return self.streams[name]

        placed.client.start = start
        return placed

    def ended(self, request_id):
        self.ended_keys.append(request_id)

    def finished(self, placed, all_ids):
        pass


async def started(cluster, number):
    async with asyncio.timeout(5):
        while len(cluster.starts) < number:
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    return cluster.starts[-number:] if number else []


async def read(responses):
    async with aclosing(responses):
        return [response async for response in responses]


def asked(generator, **fields):
    sampling = common_pb2.SamplingParams(seed=5, max_tokens=9)
    request = GenerateRequest(text="a", request_id="r", sampling=sampling, **fields)
    return asyncio.create_task(read(generator.generate(request)))


def first_token(cluster, name):
    cluster.streams[name].put(Output((70,), admitted=ADMITTED))


def last_token(cluster, name):
    cluster.streams[name].put(Output((71,), finished=FinishReason.STOP))


async def test_the_others_follow_the_first_when_its_rank_has_the_prompt(tokenizer):
    cluster = HeldCluster()
    reading = asked(generator_of(tokenizer, cluster), n=3)
    assert await started(cluster, 1) == [("r", "d1")]
    first_token(cluster, "r")
    assert sorted(await started(cluster, 3)) == [("r", "d1"), ("r#1", "d1"), ("r#2", "d1")]
    assert cluster.seeds == {"r": 5, "r#1": seed_of(5, 1), "r#2": seed_of(5, 2)}
    assert cluster.asked_room == [3]
    for name in ("r#2", "r#1"):
        first_token(cluster, name)
    for name in ("r", "r#1", "r#2"):
        last_token(cluster, name)
    responses = await reading
    assert {response.request_id for response in responses} == {"r"}
    assert sorted(r.index for r in responses if r.HasField("finish")) == [0, 1, 2]
    assert set(cluster.ended_keys) == {f"\0r\0{index}" for index in range(3)}


async def test_where_the_holder_takes_no_more_one_leads_elsewhere(tokenizer):
    cluster = HeldCluster()
    reading = asked(generator_of(tokenizer, cluster), n=4)
    await started(cluster, 1)
    cluster.refusing.add("d1")
    first_token(cluster, "r")
    assert await started(cluster, 2) == [("r", "d1"), ("r#1", "d2")]
    first_token(cluster, "r#1")
    assert await started(cluster, 4) == [("r", "d1"), ("r#1", "d2"), ("r#2", "d2"), ("r#3", "d2")]
    for name in ("r#2", "r#3"):
        first_token(cluster, name)
    for name in cluster.streams:
        last_token(cluster, name)
    await reading


async def test_one_of_those_that_lost_their_rank_leads_and_the_others_wait_for_it(tokenizer):
    cluster = HeldCluster()
    generator = generator_of(tokenizer, cluster, max_attempts=3)
    reading = asked(generator, n=3)
    await started(cluster, 1)
    for name in ("r", "r#1", "r#2"):
        await started(cluster, 1)
        first_token(cluster, name)
        await started(cluster, 3 if name == "r" else 0)
    for name in ("r#2", "r", "r#1"):
        cluster.streams[name].put(DecodeRankLost("gone"))
    (leader,) = await started(cluster, 4) and cluster.starts[3:]
    assert leader[1] == "d2"
    first_token(cluster, leader[0])
    assert {rank for _, rank in (await started(cluster, 6))[3:]} == {"d2"}
    for name in {"r", "r#1", "r#2"} - {leader[0]}:
        first_token(cluster, name)
    for name in cluster.streams:
        last_token(cluster, name)
    responses = await reading
    assert sum(response.HasField("finish") for response in responses) == 3
    assert len(cluster.excluded) == 2  # placements anywhere


async def test_an_abort_reaches_those_that_wait(tokenizer):
    cluster = HeldCluster()
    generator = generator_of(tokenizer, cluster)
    reading = asked(generator, n=3)
    await started(cluster, 1)
    assert generator.abort("r")
    cluster.streams["r"].put(Output(finished=FinishReason.ABORTED))
    responses = await reading
    reasons = [response.finish.reason for response in responses]
    assert reasons == [common_pb2.FINISH_REASON_ABORTED] * 3
    assert len(cluster.starts) == 1


async def test_an_abort_before_the_prompt_is_encoded_reaches_all(tokenizer):
    cluster = HeldCluster()
    generator = generator_of(tokenizer, cluster)
    encoder = MagicMock()

    async def encode(request, past):
        assert generator.abort("r")
        return PackedIds.of([7])

    encoder.encode = encode
    generator._encoder = lambda: encoder
    async with asyncio.timeout(5):
        responses = await asked(generator, n=3)
    reasons = [response.finish.reason for response in responses]
    assert reasons == [common_pb2.FINISH_REASON_ABORTED] * 3
    assert not cluster.starts


async def test_an_error_of_one_ends_all_and_is_raised(tokenizer, subtests):
    for error in [NoCapacity("full"), PeerFailed("gone")]:
        with subtests.test(error=error):
            cluster = HeldCluster()
            generator = generator_of(tokenizer, cluster)
            reading = asked(generator, n=3)
            await started(cluster, 1)
            first_token(cluster, "r")
            await started(cluster, 3)
            cluster.streams["r#1"].put(error)
            with pytest.raises(type(error)):
                await reading
            assert set(cluster.ended_keys) == {f"\0r\0{index}" for index in range(3)}
            assert generator.num_running == 0
            for name in ("r", "r#2"):
                cluster.streams[name]._client.send_abort.assert_called_once()


class TalkingTwice(TalkingCluster):
    def place_at(self, prompt, conversation_id, excluded, rank):
        return self.place(prompt, conversation_id, excluded, 0.0)


async def test_each_answer_of_a_chat_has_its_own_calls_and_name(tokenizer):
    cluster = TalkingTwice(tokenizer, f"<think>hm.</think>{CALL}")
    chat = Chat(messages=[ChatMessage(role="user", content="a")], tools=[F])
    generator = generator_of(tokenizer, cluster)
    prompts = []
    generated = generator.generate(GenerateRequest(chat=chat, n=2), report_prompt=prompts.append)
    responses = [response async for response in generated]
    ids = set()
    for index in range(2):
        own = [response for response in responses if response.index == index]
        calls = [call for response in own for call in response.tool_calls]
        assert "".join(call.arguments for call in calls) == '{"a": 1}' and calls[0].index == 0
        assert "".join(response.reasoning for response in own) == "hm."
        assert own[-1].finish.reason == common_pb2.FINISH_REASON_TOOL_CALLS
        assert own[0].answer_id == own[-1].finish.answer_id
        ids.add(own[0].answer_id)
    assert len(ids) == 2 and "" not in ids
    assert len(prompts) == 1
