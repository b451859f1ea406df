import asyncio
import math
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest
from opentelemetry.trace import INVALID_SPAN

from services.router.cluster import HashedPrompt
from services.router.connections.output_stream import OutputStream
from services.router.connections.rank_connections import DecodeRankLost
from services.router.request.client_request import ClientRequest
from services.router.request.generation import Generator
from services.values.errors import (
    ContextExceeded,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    NotFound,
    Unavailable,
)
from services.values.rank import Generation, Plan, RankId, Role
from services.values.request import Admitted, FinishReason, Output, SamplingParams, TokenLogprobs
from services.wire.isthmus.v1 import common_pb2, generation_pb2


class Outcomes(list):
    """In the place of RouterMetrics."""

    def ended(self, progress, outcome, took_s):
        self.append(outcome)


ENDS = [
    (None, math.inf, "finished"),
    (NoCapacity("full"), math.inf, "NoCapacity"),
    (ContextExceeded("long"), math.inf, "InvalidRequest"),
    (KeyError("a bug"), math.inf, "Internal"),
    (KeyError("a bug"), 50.0, "Internal"),
    (asyncio.CancelledError(), math.inf, "cancelled"),
    (asyncio.CancelledError(), 101.0, "cancelled"),
    (asyncio.CancelledError(), 99.0, "DeadlineExceeded"),
    (GeneratorExit(), 100.05, "DeadlineExceeded"),  # gRPC's clock is not ours
    (GeneratorExit(), 101.0, "cancelled"),
]


def test_how_a_request_ended(subtests):
    for error, deadline, outcome in ENDS:
        with subtests.test(error=error, deadline=deadline, outcome=outcome):
            outcomes = Outcomes()
            cluster = SimpleNamespace(ended=lambda request_id: None)
            generator = Generator(
                "m",
                None,
                cluster,
                outcomes,
                max_attempts=1,
                max_wait_s=1.0,
                request_timeout_s=9.0,
                clock=lambda: 100.0,
            )
            try:
                with generator._track(ClientRequest("r", SamplingParams(), deadline=deadline), INVALID_SPAN):
                    assert generator.num_running == 1
                    if error is not None:
                        raise error
            except BaseException as raised:
                assert raised is error
            assert outcomes == [outcome]
            assert generator.num_running == 0


@pytest.fixture
def generator():
    cluster = SimpleNamespace(ended=lambda request_id: None)
    limits = {"max_attempts": 1, "max_wait_s": 1.0, "request_timeout_s": 9.0}
    return Generator("m", None, cluster, Outcomes(), **limits)


def tracked(generator, tenant="acme"):
    return generator._track(ClientRequest("r", SamplingParams(), tenant=tenant), INVALID_SPAN)


def test_a_tenants_key_aborts_its_own_requests_alone_whoever_else_has_one_of_that_id(generator):
    with tracked(generator) as progress:
        assert not generator.abort("r", "another") and not generator.abort("other")
        assert not progress.aborted
        assert generator.abort("r", "acme") and progress.aborted
        assert generator.abort("r")

    ended = []
    generator._cluster.ended = ended.append
    with tracked(generator) as acmes, tracked(generator, "other") as others:
        assert generator.num_running == 2
        assert [generator.is_running(tenant, "r") for tenant in ("acme", "other", "third")] == [
            True,
            True,
            False,
        ]
        assert generator.abort("r", "other")
        assert (acmes.aborted, others.aborted) == (False, True)
        assert generator.abort("r") and acmes.aborted
    assert len(set(ended)) == 2  # what the router books of one is not the other's
    assert generator.num_running == 0


def test_an_adapter_is_not_unknown_while_no_rank_is_there_to_have_it(generator):
    generator._cluster.adapters = dict
    generator._cluster.check_usable = MagicMock(side_effect=[Unavailable("no decode rank"), None])
    for error in (Unavailable, NotFound):  # which clients try again, or do not
        with pytest.raises(error):
            generator.check_usable("m:a")


async def test_a_tenant_that_runs_few_beside_a_crowd_is_not_refused_for_load(character_tokenizer):
    """It takes turns with the others; a crowd of one tenant waits for itself. What was said at the door is
    said at the placement, too."""
    cluster = LosingCluster(0)
    generator = Generator(
        "m", character_tokenizer, cluster, MagicMock(), max_attempts=1, max_wait_s=1.0, request_timeout_s=60.0
    )

    async def allowed_s(tenant):
        cluster.allowed_s.clear()
        with pytest.raises((DecodeRankLost, InvalidRequest)):
            await anext(generator.generate(generation_pb2.GenerateRequest(text="a", tenant=tenant)))
        assert len(cluster.allowed_s) == 2 and len(set(cluster.allowed_s)) == 1
        return cluster.allowed_s[0]

    with ExitStack() as stack:
        for number in range(4):
            crowd = ClientRequest(f"r{number}", SamplingParams(), tenant="crowd")
            stack.enter_context(generator._track(crowd, INVALID_SPAN))
        assert (await allowed_s("crowd"), await allowed_s("quiet")) == (1.0, math.inf)
        cluster.takes_turns = False
        assert await allowed_s("quiet") == 1.0
        cluster.takes_turns = True
        quiet = ClientRequest("q", SamplingParams(), tenant="quiet")
        stack.enter_context(generator._track(quiet, INVALID_SPAN))
        assert (await allowed_s("crowd"), await allowed_s("quiet")) == (1.0, 1.0)
    assert (await allowed_s("quiet"), generator._tenants) == (1.0, {})


def test_who_listens_is_told_how_requests_end_until_it_stops(generator):
    told = []
    stop = generator.listen(lambda progress, outcome: told.append((progress.request.tenant, outcome)))
    with tracked(generator):
        assert [progress.request.request_id for progress in generator.running] == ["r"] and not told
    stop()
    with tracked(generator):
        pass
    assert told == [("acme", "finished")] and not generator.running


class LosingCluster:
    """Each of its ranks is lost after `num_tokens` of a request; the sixth placement is refused."""

    def __init__(self, num_tokens, moves_penalties=True):
        self._num_tokens = num_tokens
        self._moves_penalties = moves_penalties
        self.excluded = []
        self.allowed_s = []
        self.takes_turns = True

    def check_room(self, max_wait_s, answers=1):
        self.allowed_s.append(max_wait_s)

    def max_context_tokens(self):
        return 100

    async def hash(self, ids, tenant, more_tokens):
        return HashedPrompt(ids, 0, ())

    def siblings(self, ranks):
        return ranks  # each is a worker of its own

    def place(self, prompt, conversation_id, excluded, max_wait_s):
        self.allowed_s.append(max_wait_s)
        self.excluded.append({rank.worker for rank in excluded})
        if len(self.excluded) == 6:
            raise InvalidRequest("enough")
        placed = MagicMock(
            prefill=None, source=None, plan=Plan.LOCAL, coming=None, moves_penalties=self._moves_penalties
        )
        placed.decision.reason, chosen = "cheapest", placed.decision.chosen
        chosen.prefill = chosen.source = None
        chosen.decode.hit_tokens = chosen.reused_tokens = 0
        placed.decision.chosen.decode.id = RankId(f"d{len(self.excluded)}", 0, Generation(1))
        placed.client.start = self._start
        return placed

    def _start(self, start, prompt):
        stream = OutputStream(MagicMock(), "r")
        admitted = Admitted(1, 0, 0, 1, 0, 0, 0.0, 0.0, 0.0, 0.0, Plan.LOCAL)
        for token_id in range(self._num_tokens):
            stream.put(Output((token_id,), admitted=None if token_id else admitted))
        stream.put(DecodeRankLost("gone"))
        return stream

    def sent(self, request_id, conversation_id, placed):
        pass

    def admitted(self, request_id, placed, admitted):
        pass

    def failed(self, incarnation):
        pass

    def ended(self, request_id):
        pass


FORGIVEN = [
    (0, DecodeRankLost, [set(), {"d1"}]),
    (1, DecodeRankLost, [set(), {"d1"}]),  # it may be the request that breaks them
    (2, InvalidRequest, [set(), {"d1"}, {"d2"}, {"d3"}, {"d4"}, {"d5"}]),
]


async def test_ranks_are_forgiven_by_the_second_token(character_tokenizer, subtests):
    for num_tokens, error, excluded in FORGIVEN:
        with subtests.test(num_tokens=num_tokens, error=error, excluded=excluded):
            cluster = LosingCluster(num_tokens)
            generator = Generator(
                "m",
                character_tokenizer,
                cluster,
                MagicMock(),
                max_attempts=2,
                max_wait_s=1.0,
                request_timeout_s=60.0,
            )
            request = generation_pb2.GenerateRequest(text="a")
            got = []
            with pytest.raises(error):
                async for response in generator.generate(request):
                    got.extend(response.token_ids)
            assert cluster.excluded == excluded
            assert got == [*range(num_tokens)] * min(5, len(excluded))


async def test_a_stream_is_closed_though_the_books_of_placement_fail(character_tokenizer):
    streams = []

    class Broken(LosingCluster):
        def _start(self, start, prompt):
            streams.append(MagicMock())
            return streams[-1]

        def sent(self, request_id, conversation_id, placed):
            raise KeyError("a bug")

    generator = Generator(
        "m",
        character_tokenizer,
        Broken(1),
        MagicMock(),
        max_attempts=2,
        max_wait_s=1.0,
        request_timeout_s=60.0,
    )
    with pytest.raises(KeyError):
        async for _ in generator.generate(generation_pb2.GenerateRequest(text="a")):
            pass
    (stream,) = streams
    stream.close.assert_called_once()


PLACES = [
    (2, False, {"frequency_penalty": 0.5}, 1),
    (1, False, {"presence_penalty": -0.5}, 1),
    (2, False, {"repetition_penalty": 1.1}, 1),
    (2, False, {"constraint": common_pb2.Constraint(regex="a+")}, 1),
    (2, True, {"constraint": common_pb2.Constraint(regex="a+")}, 6),
    (0, False, {"frequency_penalty": 0.5}, 2),  # nothing was generated yet
    (2, False, {"temperature": 0.5}, 6),
    (2, True, {"frequency_penalty": 0.5}, 6),
]


async def test_an_answer_whose_penalties_would_change_ends_where_it_was_cut_off(
    character_tokenizer, subtests
):
    for num_tokens, moves_penalties, sampling, places in PLACES:
        with subtests.test(
            num_tokens=num_tokens, moves_penalties=moves_penalties, sampling=sampling, places=places
        ):
            cluster = LosingCluster(num_tokens, moves_penalties)
            generator = Generator(
                "m",
                character_tokenizer,
                cluster,
                MagicMock(),
                max_attempts=2,
                max_wait_s=1.0,
                request_timeout_s=60.0,
            )
            generator._grammars = AsyncMock()  # any will do
            request = generation_pb2.GenerateRequest(text="a", sampling=common_pb2.SamplingParams(**sampling))
            got = []
            with pytest.raises(IsthmusError) as raised:
                async for response in generator.generate(request):
                    got.extend(response.token_ids)
            assert len(cluster.excluded) == places
            assert got == [*range(num_tokens)] * min(5, places)
            assert isinstance(raised.value, Unavailable) == (places == 1)
            if places == 1:
                assert "penalties" in str(raised.value) and "(gone)" in str(raised.value)


async def test_a_client_goes_before_others_only_as_far_as_the_operator_allows(character_tokenizer, subtests):
    for max_priority, priority, is_let_in in [
        (0, 0, True),
        (0, -5, True),
        (0, 1, False),
        (2, 2, True),
        (2, 3, False),
        (2, 2**31 - 1, False),
    ]:
        with subtests.test(max_priority=max_priority, priority=priority, is_let_in=is_let_in):
            cluster, metrics = LosingCluster(0), MagicMock()
            generator = Generator(
                "m",
                character_tokenizer,
                cluster,
                metrics,
                max_attempts=1,
                max_wait_s=1.0,
                request_timeout_s=60.0,
                max_priority=max_priority,
            )
            request = generation_pb2.GenerateRequest(text="a", priority=priority)
            with pytest.raises(DecodeRankLost if is_let_in else InvalidRequest) as raised:
                await anext(generator.generate(request))
            assert len(cluster.excluded) == is_let_in
            if not is_let_in:
                assert str(raised.value).startswith(f"priority must be at most {max_priority}")
                metrics.rejected.assert_called_once_with(raised.value)


class OutgrownCluster(LosingCluster):
    """Each of its ranks ends a request with LENGTH after `num_tokens`; no other holds more than the third."""

    def length_means(self, num_tokens, output_tokens, max_tokens):
        assert num_tokens - output_tokens == 1 and output_tokens == self._num_tokens * len(self.excluded)
        return FinishReason.CAPACITY if len(self.excluded) == 3 else None

    def _start(self, start, prompt):
        stream = OutputStream(MagicMock(), "r")
        admitted = Admitted(1, 0, 0, 1, 0, 0, 0.0, 0.0, 0.0, 0.0, Plan.LOCAL)
        for token_id in range(self._num_tokens):
            finished = FinishReason.LENGTH if token_id == self._num_tokens - 1 else None
            stream.put(Output((token_id,), admitted=None if token_id else admitted, finished=finished))
        return stream

    def finished(self, placed, all_ids):
        pass


async def outgrowing(tokenizer, cluster, on_response=lambda generator, got: None, **sampling):
    """(tokens, how it finished)"""
    generator = Generator(
        "m", tokenizer, cluster, MagicMock(), max_attempts=1, max_wait_s=1.0, request_timeout_s=60.0
    )
    request = generation_pb2.GenerateRequest(text="a", sampling=common_pb2.SamplingParams(**sampling))
    got = []
    async for response in generator.generate(request):
        got.extend(response.token_ids)
        on_response(generator, response)
    return got, common_pb2.FinishReason.Name(response.finish.reason).removeprefix("FINISH_REASON_")


async def test_at_the_end_of_a_pool_no_rank_is_to_blame(character_tokenizer):
    """One token each is no progress, and no failure either; only what may not move ends there."""
    for num_tokens in (1, 2):
        cluster = OutgrownCluster(num_tokens)
        assert await outgrowing(character_tokenizer, cluster) == ([*range(num_tokens)] * 3, "CAPACITY")
        assert cluster.excluded == [set()] * 3
    cluster = OutgrownCluster(2, moves_penalties=False)
    answer = await outgrowing(character_tokenizer, cluster, frequency_penalty=0.5)
    assert answer == ([0, 1], "CAPACITY")
    cluster = OutgrownCluster(2, moves_penalties=False)
    assert await outgrowing(character_tokenizer, cluster) == ([0, 1] * 3, "CAPACITY")


async def test_a_stop_string_or_an_abort_at_the_end_of_a_pool_ends_the_request(character_tokenizer):
    cluster = OutgrownCluster(2)
    stop = character_tokenizer.token_text(1)
    assert await outgrowing(character_tokenizer, cluster, stop=[stop]) == ([0, 1], "STOP")
    assert len(cluster.excluded) == 1
    cluster = OutgrownCluster(1)

    def abort(generator, response):
        assert generator.abort(response.request_id) or response.HasField("finish")

    assert await outgrowing(character_tokenizer, cluster, abort) == ([0], "ABORTED")
    assert len(cluster.excluded) == 1


class AtOnceCluster(LosingCluster):
    """Its rank sends all tokens of a request together, with logprobs."""

    def _start(self, start, prompt):
        stream = OutputStream(MagicMock(), "r")
        admitted = Admitted(1, 0, 0, 1, 0, 0, 0.0, 0.0, 0.0, 0.0, Plan.LOCAL)
        ids = tuple(range(self._num_tokens))
        stream.put(Output(ids, tuple(TokenLogprobs(i, -0.5, ()) for i in ids), admitted=admitted))
        return stream

    def finished(self, placed, all_ids):
        self.all_ids = list(all_ids)


async def test_what_comes_together_with_a_stop_string_is_no_part_of_the_answer(character_tokenizer):
    """A rank that drafts sends more tokens together than one that does not."""
    texts = [character_tokenizer.token_text(token_id) for token_id in range(9)]
    cluster = AtOnceCluster(9)
    generator = Generator(
        "m", character_tokenizer, cluster, MagicMock(), max_attempts=1, max_wait_s=1.0, request_timeout_s=60.0
    )
    sampling = common_pb2.SamplingParams(stop=[texts[4] + texts[5]], logprobs=0)
    request = generation_pb2.GenerateRequest(text="a", sampling=sampling)
    (response,) = [response async for response in generator.generate(request)]
    assert list(response.token_ids) == [0, 1, 2, 3, 4, 5] == cluster.all_ids[-6:]
    assert [each.chosen.token_id for each in response.logprobs] == [0, 1, 2, 3, 4, 5]
    assert response.text == "".join(texts[:4])
    assert response.finish.usage.completion_tokens == 6
    assert response.finish.matched_stop == texts[4] + texts[5]


def reading(tokenizer):
    cluster = LosingCluster(0)
    return Generator(
        "m", tokenizer, cluster, MagicMock(), max_attempts=1, max_wait_s=1.0, request_timeout_s=60.0
    )


UNCOUNTABLE = [
    (generation_pb2.GenerateRequest(text="a" * 1600), ContextExceeded),
    (generation_pb2.GenerateRequest(text="a", model="another"), NotFound),
    (generation_pb2.GenerateRequest(), InvalidRequest),
]


async def test_a_prompt_is_counted_though_no_context_holds_it(character_tokenizer, subtests):
    for length in [3, 99, 100, 1600 - 1]:
        with subtests.test(length=length):
            text = "a" * length
            told = await reading(character_tokenizer).tokenize(generation_pb2.GenerateRequest(text=text))
            assert list(told.token_ids) == character_tokenizer.encode(text)
            assert told.max_context_tokens == 100
    for request_, error in UNCOUNTABLE:
        with subtests.test(request_=request_, error=error), pytest.raises(error):
            await reading(character_tokenizer).tokenize(request_)


async def test_the_text_of_ids_has_its_special_tokens(character_tokenizer):
    generator = reading(character_tokenizer)
    ids = [*character_tokenizer.encode("ab", special_tokens=False), *character_tokenizer.eos_token_ids]
    assert await generator.detokenize("m", ids, "") == "ab" + character_tokenizer.token_text(ids[-1])
    for model, wrong, error in (
        ("another", ids, NotFound),
        ("", [], InvalidRequest),
        ("", [character_tokenizer.vocab_size], InvalidRequest),
    ):
        with pytest.raises(error):
            await generator.detokenize(model, wrong, "")


def test_the_ranks_of_a_model_are_those_that_are_up():
    ranks = {Role.DECODE: ["d0", "d1"], Role.PREFILL: ["p0"]}
    up = ["d0", "p0"]
    cluster = SimpleNamespace(
        ranks=ranks.__getitem__, is_up=lambda view: view in up, max_context_tokens=lambda: 9, adapters=dict
    )
    limits = {"max_attempts": 1, "max_wait_s": 1.0, "request_timeout_s": 9.0}
    generator = Generator("m", None, cluster, Outcomes(), **limits)
    for decode_ranks, prefill_ranks in ((1, 1), (0, 1), (0, 0)):
        (model,) = generator.list_models().models
        assert (model.decode_ranks, model.prefill_ranks) == (decode_ranks, prefill_ranks)
        assert model.max_context_tokens == 9
        del up[:1]
