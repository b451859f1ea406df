"""These tests show what a request's last response says of it, wherever it has been: the identities of
generation.proto."""

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import MagicMock

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.cluster import HashedPrompt
from services.router.connections.output_stream import OutputStream
from services.router.connections.rank_connections import DecodeRankLost
from services.router.dialects.usage_json import isthmus_json
from services.router.request.generation import Generator
from services.values.rank import Generation, Plan, RankId
from services.values.request import Admitted, FinishReason, Output, Pulled
from services.wire import convert
from services.wire.isthmus.v1 import common_pb2, generation_pb2

PAGE, PAGE_BYTES = 4, 1 << 10


@dataclass(frozen=True)
class Stay:
    """At one placement: what was held there, as shares of what there was, and how it ended."""

    plan: Plan
    decode_share: float
    prefill_share: float
    num_tokens: int
    end: str  # lost, outgrown, stopped, aborted
    pulled: Pulled | None = None  # None: it had no source


PULLED = st.sampled_from([None, Pulled(refused="busy"), Pulled(PAGE, PAGE_BYTES, 0.01)])
stays = st.builds(
    Stay,
    st.sampled_from(Plan),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([0, 1, 1, 2, 5]),
    st.sampled_from(["lost", "outgrown"]),
    PULLED,
)
last_stays = st.builds(
    Stay,
    st.sampled_from(Plan),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 5),
    st.sampled_from(["stopped", "aborted"]),
    PULLED,
)


def admitted_at(stay: Stay, prompt_tokens: int) -> Admitted:
    """As a decode rank tells it: hits are whole pages, and a token at least is computed."""
    held, computed_before = (
        int(share * (prompt_tokens - 1)) // PAGE * PAGE for share in (stay.decode_share, stay.prefill_share)
    )
    all_pages, remote = -(-prompt_tokens // PAGE), stay.plan is Plan.REMOTE
    return Admitted(
        prompt_tokens=prompt_tokens,
        decode_prefix_len=held,
        prefill_prefix_len=computed_before if remote else 0,
        computed_tokens=prompt_tokens - (computed_before if remote else held),
        kv_bytes_moved=(all_pages - held // PAGE) * PAGE_BYTES if remote else 0,
        kv_bytes_prompt=all_pages * PAGE_BYTES,
        decode_queue_s=0.0,
        prefill_queue_s=0.0,
        prefill_compute_s=0.0,
        transfer_s=0.0,
        plan=stay.plan,
        carried_bytes={"recurrent": PAGE_BYTES} if remote else {},
        pulled=stay.pulled,
    )


class Travelled:
    """In the place of a cluster: the n-th placement is the n-th stay."""

    def __init__(self, stays: list[Stay]) -> None:
        self.stays = stays
        self.told: list[tuple[int, Admitted]] = []  # by stays that generated
        self._placed = 0

    def __getattr__(self, name):
        return lambda *arguments: None

    def max_context_tokens(self):
        return 10_000

    async def hash(self, ids, tenant, more_tokens):
        return HashedPrompt(ids, 0, ())

    def place(self, prompt, conversation_id, excluded, max_wait_s):
        number, self._placed = self._placed, self._placed + 1
        prefill = SimpleNamespace(id=RankId("p", number, Generation(1)), hit_tokens=0)
        source = SimpleNamespace(id=RankId("s", number, Generation(1)))
        remote = self.stays[number].plan is Plan.REMOTE
        chosen = MagicMock(
            decode=SimpleNamespace(
                id=RankId("d", number, Generation(1)),
                hit_tokens=number,
                matched_tokens=0,
            ),
            prefill=prefill if remote else None,
            reused_tokens=number,
            source=source if self.stays[number].pulled else None,
        )
        decision = SimpleNamespace(chosen=chosen, reason="cheapest")
        client = SimpleNamespace(start=lambda command, _: self._start(number, len(prompt.ids)))
        return MagicMock(
            decision=decision,
            client=client,
            prefill=None,
            source=None,
            plan=self.stays[number].plan,
            moves_penalties=True,
            coming=None,
        )

    def _start(self, number: int, prompt_tokens: int) -> OutputStream:
        stay, stream = self.stays[number], OutputStream(MagicMock(), "r")
        admitted = admitted_at(stay, prompt_tokens)
        ends = {
            "outgrown": FinishReason.LENGTH,
            "stopped": FinishReason.STOP,
            "aborted": FinishReason.ABORTED,
        }
        for index in range(stay.num_tokens):
            finished = ends.get(stay.end) if index == stay.num_tokens - 1 else None
            first = None if index else admitted
            stream.put(Output((7,), (), first, finished, drafted_tokens=3, accepted_draft_tokens=2))
        if stay.num_tokens:
            self.told.append((number, admitted))
        if stay.end == "lost" or not stay.num_tokens:
            stream.put(DecodeRankLost("gone"))
        return stream


async def finish_of(tokenizer, cluster, prompt_tokens) -> generation_pb2.Finish:
    generator = Generator(
        "m", tokenizer, cluster, MagicMock(), max_attempts=99, max_wait_s=1.0, request_timeout_s=60.0
    )
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[1] * prompt_tokens),
        sampling=common_pb2.SamplingParams(seed=1),
    )
    responses = [response async for response in generator.generate(request)]
    return responses[-1].finish


def check_identities(usage, plan) -> None:
    assert usage.prompt_tokens == usage.reused_tokens + usage.computed_tokens
    if plan == common_pb2.PLAN_REMOTE:
        assert usage.prompt_tokens == usage.decode_prefix_len + usage.delta_tokens
    else:
        assert usage.delta_tokens == usage.kv_bytes_moved == 0
    assert bool(usage.kv_bytes_moved) == bool(usage.delta_tokens)


def sums(messages, names) -> dict[str, int]:
    return {name: sum(getattr(message, name) for message in messages) for name in names}


@settings(max_examples=40, deadline=None)
@given(st.lists(stays, max_size=6), last_stays, st.integers(1, 30))
def test_usage_placements_and_totals_say_the_same(character_tokenizer, moved, last, prompt_tokens):
    cluster = Travelled([*moved, last])
    finish = asyncio.run(finish_of(character_tokenizer, cluster, prompt_tokens))
    placements, usage = finish.placements, finish.usage

    assert [placement.decode.rank for placement in placements] == [number for number, _ in cluster.told]
    reached = prompt_tokens
    for placement, (number, admitted) in zip(placements, cluster.told, strict=True):
        own = placement.usage
        check_identities(own, placement.plan)
        assert placement.plan == convert.plan_to_proto(cluster.stays[number].plan)
        assert placement.HasField("prefill") == (placement.plan == common_pb2.PLAN_REMOTE)
        assert own.prompt_tokens == reached
        assert own.kv_bytes_moved == admitted.kv_bytes_moved
        pulled = cluster.stays[number].pulled
        assert placement.HasField("source") == (pulled is not None)
        assert placement.pull_refused == (pulled.refused if pulled else "")
        told = (pulled.tokens, pulled.bytes) if pulled else (0, 0)
        assert (own.pulled_tokens, own.pulled_bytes) == told
        assert own.carried_bytes == admitted.carried_bytes
        assert own.drafted_tokens == 3 * own.completion_tokens
        assert own.accepted_draft_tokens == 2 * own.completion_tokens
        assert own.kv_bytes_moved + own.kv_bytes_saved == admitted.kv_bytes_prompt
        reached += own.completion_tokens
    assert reached == prompt_tokens + usage.completion_tokens

    assert finish.placement == placements[0]
    check_identities(usage, finish.placement.plan)
    only_generated = generation_pb2.Usage(completion_tokens=usage.completion_tokens)
    expected = generation_pb2.Usage()
    expected.CopyFrom(placements[0].usage)
    expected.MergeFrom(only_generated)
    assert usage == expected

    names = [field.name for field in generation_pb2.Totals.DESCRIPTOR.fields]
    totals = sums([finish.totals], names)
    assert totals == sums([placement.usage for placement in placements], names)
    assert totals["prompt_tokens"] == totals["reused_tokens"] + totals["computed_tokens"]
    assert totals["completion_tokens"] == usage.completion_tokens

    shown = isthmus_json(finish)
    assert shown["totals"] == totals
    assert [p["decode_rank"] for p in shown["placements"]] == [f"d/{number}" for number, _ in cluster.told]
    for name in (
        "plan",
        "decode_rank",
        "prefill_rank",
        "decode_prefix_len",
        "delta_tokens",
        "kv_bytes_moved",
        "pulled_tokens",
        "pulled_bytes",
        "source_rank",
        "pull_refused",
    ):
        assert shown[name] == shown["placements"][0][name]


async def test_what_generated_nothing_has_no_usage(character_tokenizer):
    """Aborted while its prompt is hashed, before it has a rank."""
    cluster = Travelled([])
    generator = Generator(
        "m", character_tokenizer, cluster, MagicMock(), max_attempts=9, max_wait_s=1.0, request_timeout_s=60.0
    )

    async def hash(ids, tenant, more_tokens):
        assert generator.abort("mine")
        return HashedPrompt(ids, 0, ())

    cluster.hash = hash
    request = generation_pb2.GenerateRequest(text="abc", request_id="mine")
    async for response in generator.generate(request):
        finish = response.finish
    assert finish.reason == common_pb2.FINISH_REASON_ABORTED
    assert not finish.placements and not finish.HasField("placement")
    assert finish.usage == generation_pb2.Usage() and finish.totals == generation_pb2.Totals()


class Summed(Travelled):
    """Its engine tells of drafts at the end alone, and of no token with them."""

    def _start(self, number, prompt_tokens):
        stream = OutputStream(MagicMock(), "r")
        stream.put(Output((7,), (), admitted_at(self.stays[number], prompt_tokens)))
        stream.put(Output((), (), None, FinishReason.STOP, drafted_tokens=3, accepted_draft_tokens=2))
        return stream


async def test_drafts_that_are_told_without_a_token_count(character_tokenizer):
    finish = await finish_of(character_tokenizer, Summed([Stay(Plan.LOCAL, 0.0, 0.0, 1, "stopped")]), 5)
    assert (finish.usage.drafted_tokens, finish.usage.accepted_draft_tokens) == (3, 2)
