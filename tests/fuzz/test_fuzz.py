"""A short fuzz, and that it sees what is wrong."""

import random
from types import MappingProxyType

import numpy as np
import pytest

from fuzz.requests import Asked, Tree
from fuzz.round import Round
from fuzz.setup import Setup, draw_setup
from fuzz.verdict import Answer, Text, find_faults
from services.request import SamplingParams
from services.wire.isthmus.v1 import common_pb2, generation_pb2

RANK = MappingProxyType(
    {"page_size": 16, "chunk_size": 33, "max_running_requests": 8, "kv_digest_share": 1.0}
)
KILLS = Setup("one-kv-head", ("remote",), (1, 1), (1, 1), False, True, RANK | {"kv_pages": 64})
TIGHT = Setup("tied-qwen3", ("remote", "local"), (1,), (1,), True, False, RANK | {"kv_pages": 8})


@pytest.mark.parametrize("setup", [KILLS, TIGHT], ids=["kills", "tight"])
async def test_a_short_fuzz(etcd_endpoint, cluster_name, setup):
    """`make fuzz` has longer ones."""
    played = Round(setup, random.Random(7), cluster_name)
    await played.play(etcd_endpoint, cluster_name, num_requests=20)
    assert played.faults == []
    assert played.counts["answers"] > 5
    assert played.counts["kills" if setup.kills else "retractions"] > 0


def test_a_seed_draws_the_same_again():
    def drawn(seed):
        chance = random.Random(seed)
        tree = Tree(chance, 128)
        return draw_setup(chance), [tree.draw() for _ in range(20)]

    assert drawn(3) == drawn(3) != drawn(4)
    prompts = [asked.prompt_ids for asked in drawn(3)[1]]
    assert all(0 < len(prompt) < 128 for prompt in prompts)


GREEDY = SamplingParams(temperature=0, max_tokens=3, stop_token_ids=(5,))
LOGITS = np.eye(8)[[2, 3, 4]] * 9  # 2, 3, 4 is the right answer


def answer(*token_ids, reason=common_pb2.FINISH_REASON_LENGTH, **usage):
    prompt = dict(prompt_tokens=2, computed_tokens=2, delta_tokens=2, completion_tokens=len(token_ids))
    placement = generation_pb2.Placement(plan=common_pb2.PLAN_REMOTE)
    finish = generation_pb2.Finish(
        reason=reason, usage=generation_pb2.Usage(**prompt | usage), placement=placement
    )
    return Answer(list(token_ids), [], finish)


def faults(got, sampling=GREEDY, logits=LOGITS, context=100, capacity=100):
    return find_faults(Text((0, 1), sampling, (6,), context, capacity, logits), got)


def test_a_right_answer_has_no_fault():
    assert faults(answer(2, 3, 4)) == ([], 0)
    assert faults(answer(2, 3), context=4) == ([], 0)  # the context is full
    assert faults(answer(2, 3, reason=common_pb2.FINISH_REASON_CAPACITY), capacity=4) == ([], 0)
    assert faults(Answer([2])) == ([], 0)  # its client left
    stops = np.eye(8)[[2, 5]] * 9
    assert faults(answer(2, 5, reason=common_pb2.FINISH_REASON_STOP), logits=stops) == ([], 0)


WRONG = {
    "a token": (answer(2, 7, 4), "wrong token: 1 is 7, not 3"),
    "cut short": (answer(2, 3), "wrong end: FINISH_REASON_LENGTH after 2 tokens"),
    "short of its pool": (answer(2, reason=common_pb2.FINISH_REASON_CAPACITY), "wrong end"),
    "stopped by nothing": (answer(2, 3, 4, reason=common_pb2.FINISH_REASON_STOP), "wrong end"),
    "tokens that nobody counted": (answer(2, 3, 4, completion_tokens=2), "wrong usage, completion_tokens"),
    "tokens of nobody": (answer(2, 3, 4, reused_tokens=1), "wrong usage, reused"),
    "a delta that is no rest": (answer(2, 3, 4, decode_prefix_len=1), "wrong usage, prefix"),
}


@pytest.mark.parametrize("got,said", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(got, said):
    [fault], _ = faults(got)
    assert fault.startswith(said)


def test_what_goes_on_after_its_end_is_wrong():
    [fault], _ = faults(answer(2, 5, 4), logits=np.eye(8)[[2, 5, 4]] * 9)
    assert fault == "went on after token 1, which stops it"


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.01, seed=3, max_tokens=3)])
def test_rounding_may_choose_between_equals_and_no_others(sampling):
    logits = LOGITS.copy()
    logits[1, 7] = logits[1, 3] - 1e-6
    assert faults(answer(2, 7, 4), sampling, logits)[0] == []
    assert faults(answer(2, 6, 4), sampling, logits)[0] != []


def test_a_log_probability_that_is_off_is_wrong():
    sampling = SamplingParams(temperature=0, max_tokens=3, logprobs=0)
    rows = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))

    def told(off):
        chosen = [
            common_pb2.TokenLogprob(token_id=token_id, logprob=row[token_id] + off)
            for token_id, row in zip((2, 3, 4), rows, strict=True)
        ]
        got = answer(2, 3, 4)
        got.logprobs = [common_pb2.TokenLogprobs(chosen=each) for each in chosen]
        return faults(got, sampling)[0]

    assert told(0.0) == []
    assert len(told(0.1)) == 3
    assert faults(answer(2, 3, 4), sampling)[0] == ["0 log-probabilities of 3 tokens"]


def test_a_request_tells_what_it_was():
    asked = Asked((1, 2), generation_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(max_tokens=3)))
    assert str(asked) == "a prompt of 2 with max_tokens: 3"
