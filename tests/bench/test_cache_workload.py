from statistics import fmean

import pytest

from bench.decode_cache.workload import groups, idle, prompt_of, renamed, shared, turns

pytestmark = pytest.mark.long


def reused_share(workload):
    """Of the tokens of all prompts but first ones, how many are the conversation's own past."""
    prompts, past = 0, 0
    for conversation in workload.conversations:
        history = 0
        for turn, question in enumerate(conversation.questions):
            if turn:
                prompts, past = prompts + history + len(question), past + history
            history += len(question) + conversation.answer_tokens
    return past / prompts if prompts else 0.0


def test_workloads_of_the_cache(subtests):
    for make in [shared, groups, turns]:
        for quick in [False, True]:
            with subtests.test("a seed gives one workload and another seed another", make=make, quick=quick):
                assert make(3, quick) == make(3, quick)
                questions = [{c.questions for c in make(seed, quick).conversations} for seed in (3, 4)]
                assert not questions[0] & questions[1]
    with subtests.test("shared is one context eleven times as long as what follows"):
        workload = shared(1)
        prompts = [conversation.questions[0] for conversation in workload.conversations]
        [length] = {len(prompt) for prompt in prompts}
        prefix = length * 11 // 12
        assert len({prompt[:prefix] for prompt in prompts}) == 1
        assert len({prompt[prefix:] for prompt in prompts}) == len(prompts)
    with subtests.test("groups are eight that share seven eighths on average"):
        members = {}
        for conversation in groups(1).conversations:
            members.setdefault(conversation.name.split("-")[0], []).append(conversation.questions[0])
        assert {len(prompts) for prompts in members.values()} == {8}
        shares = []
        for prompts in members.values():
            common = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
            shares += [common / len(prompt) for prompt in prompts]
        assert fmean(shares) == pytest.approx(7 / 8, abs=0.05)
    with subtests.test("groups are shuffled"):
        names = [conversation.name.split("-")[0] for conversation in groups(1).conversations]
        assert names != sorted(names)
    with subtests.test("turns are private and reuse their own past"):
        workload = turns(1)
        assert reused_share(workload) == pytest.approx(0.91, abs=0.01)
        assert len({conversation.questions[0][:16] for conversation in workload.conversations}) == 20
    with subtests.test("a pool holds its share of the concurrency"):
        workload = shared(1)
        pages_of_one = -(-workload.conversations[0].num_tokens // 64)
        assert workload.pool_pages(64) / pages_of_one == pytest.approx(0.29 * workload.concurrency, abs=0.1)
        assert workload.pool_pages(64) // pages_of_one == 9
        ample = turns(1)
        assert ample.pool_pages(16) * 16 >= sum(
            conversation.num_tokens for conversation in ample.conversations
        )
    with subtests.test("idle prompts share a prefix only with hits"):
        for hits in (True, False):
            starts = {c.questions[0][:384] for c in idle(1, 4, hits).conversations}
            assert len(starts) == (1 if hits else 12)
    with subtests.test("a prompt is the history and the next question"):
        conversation = turns(1, quick=True).conversations[0]
        first, second, third = conversation.questions
        assert prompt_of(conversation, []) == first
        assert prompt_of(conversation, [(7, 8), (9,)]) == (*first, 7, 8, *second, 9, *third)
    with subtests.test("renamed requests are the same ones"):
        workload = shared(1, quick=True)
        other = renamed(workload, "@1")
        assert [c.questions for c in other.conversations] == [c.questions for c in workload.conversations]
        assert not {c.name for c in other.conversations} & {c.name for c in workload.conversations}
