"""Candidates and requests by their defaults, for tests of placement."""

from dataclasses import replace

import pytest

from services.router.placement.candidates import DecodeCandidate, PlacementRequest, PrefillCandidate
from services.router.placement.decision import Decision, place
from services.router.placement.price import PriceWeights
from services.values.rank import Generation, Plan, RankId, RankKey

REMOTE, LOCAL = frozenset({Plan.REMOTE}), frozenset({Plan.LOCAL})
BANDWIDTH = 1e9
WEIGHTS = PriceWeights()
NO_SLACK = replace(WEIGHTS, slack_ratio=0.0, slack_s=0.0)


def decode(index: int, **changes) -> DecodeCandidate:
    idle = DecodeCandidate(
        id=RankId("decode", index, Generation(index)),
        hit_tokens=0,
        pending_tokens=0,
        prefill_tokens_per_s=5_000.0,
        running=0,
        token_s=0.02,
        free_tokens=1_000_000,
        evictable_tokens=0,
    )
    return idle._replace(**changes)


def prefill(index: int, **changes) -> PrefillCandidate:
    return PrefillCandidate(RankId("prefill", index, Generation(index)), 0, 0, 10_000.0)._replace(**changes)


def request(prompt_tokens: int = 4_000, **changes) -> PlacementRequest:
    return replace(PlacementRequest(prompt_tokens, kv_bytes_per_token=1e5, chunk_tokens=1_000), **changes)


def uniform(sender: RankKey, receiver: RankKey) -> float:
    assert (sender.worker, receiver.worker) == ("prefill", "decode")
    return BANDWIDTH


def choose(asked, decodes, prefills=(), *, weights=WEIGHTS, tie=0.0, bandwidth=uniform) -> Decision:
    return place(asked, decodes, prefills, bandwidth, weights, tie)


def terms_of(decision: Decision) -> dict[str, float]:
    return pytest.approx(dict(decision.chosen.terms))
