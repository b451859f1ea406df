"""These tests show how many drafts of a small model a step verifies, on a clock that says what steps and
drafts cost."""

import random

import pytest

from engine.paged.core_rank import Rank
from services.engine.paged.drafters import ModelDrafter

DRAFT_S, ROW_S, FIXED_S, PROMPT_TOKEN_S = 0.001, 0.001, 0.009, 0.0002


class ScriptedDraft:
    """It implements DraftModel: right with some chance, at a price."""

    def __init__(self, rank_of, chance, seed=1, round_s=DRAFT_S):
        """`chance` is a number, or tells that of a sequence by its ids."""
        self._rank_of, self.chance, self._random = rank_of, chance, random.Random(seed)
        self.step_s = round_s
        self.calls = self.drafts = 0

    def propose(self, chunks, counts):
        rank = self._rank_of()
        rank.now += self.step_s * max(counts)
        self.calls += 1
        self.drafts += sum(counts)
        return [self._guess(rank, chunk, count) for chunk, count in zip(chunks, counts, strict=True)]

    def _guess(self, rank, chunk, count):
        right = rank.expected(chunk.history, count)
        chance = self.chance(chunk.history) if callable(self.chance) else self.chance
        return tuple(t if self._random.random() < chance else (t + 1) % 512 for t in right)


class NoDrafts:
    """It implements Drafting: guesses nothing. A rank's clock goes on whenever it is read: as often as beside
    drafts."""

    def propose(self, wishes, max_drafts, step_times):
        return [None] * len(wishes)

    def ended(self, seq):
        pass


class TimedRunner:
    def __init__(self, rank):
        self._rank, self._runner = rank, rank.core.runner

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def run(self, chunks):
        rows = sum(1 + chunk.num_drafts for chunk in chunks)
        prompt_tokens = sum(map(len, (chunk.token_ids for chunk in chunks))) - rows
        self._rank.now += FIXED_S + ROW_S * rows + PROMPT_TOKEN_S * prompt_tokens
        return self._runner.run(chunks)


def seconds(chance, batch=1, answer=60, num_pages=256, round_s=DRAFT_S):
    """That the answers take, and how the draft was asked; `chance` None: no drafts."""
    draft = ScriptedDraft(lambda: rank, chance, round_s=round_s)
    drafter = ModelDrafter(draft, 4, 5) if chance is not None else NoDrafts()
    rank = Rank(num_pages=num_pages, drafting=drafter)
    rank.core.runner = TimedRunner(rank)
    rank.run([rank.submit([400, 401], 20)])  # steps have been measured
    draft.calls = draft.drafts = 0
    began = rank.now
    seqs = [rank.submit([10 * i, 5], answer) for i in range(batch)]
    rank.run(seqs)
    assert all(rank.tokens[s] == rank.expected(s.request.prompt_ids, answer) for s in seqs)
    return rank.now - began, draft, drafter


def test_when_a_draft_is_asked(subtests):
    with subtests.test("steps in which nobody decodes ask for no drafts"):
        draft = ScriptedDraft(lambda: rank, 1.0)
        rank = Rank(num_pages=256, chunk_size=4, drafting=ModelDrafter(draft, 4, 5))
        seq = rank.submit(range(400), 2)
        rank.run([seq])
        assert rank.tokens[seq] == rank.expected(range(400), 2)
        assert draft.calls == 0

    with subtests.test("a draft that agrees is asked for all it may"):
        with_drafts, draft, drafter = seconds(1.0)
        assert with_drafts < seconds(None)[0] / 2.5
        assert draft.drafts > 4 * draft.calls
        assert "sequences=0" in repr(drafter)

    with subtests.test("a draft that never agrees is hardly asked any more"):
        plain, (with_drafts, draft, _) = seconds(None, answer=400)[0], seconds(0.0, answer=400)
        assert with_drafts < 1.03 * plain
        assert draft.calls > 2

    with subtests.test("a draft that comes to agree is found out"):
        draft = ScriptedDraft(lambda: rank, 0.0)
        rank = Rank(num_pages=1024, drafting=ModelDrafter(draft, 4, 5))
        rank.core.runner = TimedRunner(rank)
        seq = rank.submit([1, 2], 1500)
        while len(seq.ids) < 400:
            rank.step()
        draft.chance, before, steps = 1.0, len(seq.ids), 0
        while len(seq.ids) < before + 900:
            rank.step()
            steps += 1
        assert steps < 600


@pytest.mark.exact
def test_drafts_do_not_cost_more_than_they_give(subtests):
    for batch in (1, 6):
        plain = seconds(None, batch, 120)[0]
        for chance in (0.3, 0.8):
            with subtests.test("drafts do not cost more than they give", batch=batch, chance=chance):
                assert seconds(chance, batch, 120)[0] < 1.03 * plain

    with subtests.test("a round for one that agrees is not paid for by those that do not"):
        plain = seconds(None, 8, 120, 512)[0]
        of_one = seconds(lambda ids: 0.9 * (ids[0] == 0), 8, 120, 512, round_s=0.004)[0]
        assert of_one < 1.03 * plain
        assert seconds(0.9, 8, 120, 512, round_s=0.004)[0] < 0.9 * plain

    with subtests.test("those that try again do so together"):
        # However they came: a round for each of them would be one in most steps. Newcomers seldom, for
        # nobody's drafts were right.
        draft = ScriptedDraft(lambda: rank, 0.0, round_s=0.005)
        rank = Rank(num_pages=1024, max_running=16, drafting=ModelDrafter(draft, 4, 5))
        rank.core.runner = TimedRunner(rank)
        seqs, steps = [], 0
        while len(seqs) < 80:
            if steps % 8 == 0:
                seqs.append(rank.submit([len(seqs), 5], 120))
            rank.step()
            steps += 1
        assert 2 < draft.calls <= steps / 64


class FailingDraft(ScriptedDraft):
    def __init__(self, rank_of, failures):
        super().__init__(rank_of, 1.0)
        self.failures, self.proposed = failures, 0

    def propose(self, chunks, counts):
        if self.failures:
            self.failures -= 1
            raise RuntimeError("out of memory")
        self.proposed += 1
        return super().propose(chunks, counts)


def failing_rank(failures):
    draft = FailingDraft(lambda: rank, failures)
    rank = Rank(num_pages=256, drafting=ModelDrafter(draft, 4, 5))
    rank.core.runner = TimedRunner(rank)
    return draft, rank


def test_a_draft_that_fails_costs_drafts_and_no_request(subtests, caplog):
    for failures, drafts_again in [(4, True), (99, False)]:
        with subtests.test(failures=failures, drafts_again=drafts_again):
            caplog.clear()
            draft, rank = failing_rank(failures)
            seqs = [rank.submit([i, 7], 60) for i in range(3)]
            rank.run(seqs)
            assert all(rank.tokens[seq] == rank.expected(seq.request.prompt_ids, 60) for seq in seqs)
            assert (draft.proposed > 0) == drafts_again
            said = [record.getMessage() for record in caplog.records if "draft_failed" in record.message]
            assert len(said) == min(failures, 5) and ("gave_up=True" in said[-1]) != drafts_again


def test_bounds_of_a_step_hold(subtests):
    with subtests.test("a target bounds drafts and prompts together"):
        # Guessing takes its part of the step; what routers are told of one has it.
        draft = ScriptedDraft(lambda: rank, 1.0, round_s=0.003)
        drafter = ModelDrafter(draft, 4, 5)
        rank = Rank(num_pages=1024, chunk_size=256, drafting=drafter, itl_target_s=0.040)
        rank.core.runner = TimedRunner(rank)
        rank.run([rank.submit([400, 401], 20), rank.submit(range(200), 20)])  # steps have been measured
        draft.calls = 0
        decoding = rank.submit([1, 2], 400)
        prompt, took_s = rank.submit([i % 500 for i in range(2000)], 1), []
        while prompt not in rank.finished:
            began = rank.now
            rank.step()
            took_s.append(rank.now - began)
        assert decoding not in rank.finished
        assert draft.calls > 10
        assert 0.030 < max(took_s[2:]) < 0.045  # a look at its clock takes 1 ms
        rank.run([decoding])
        assert rank.core.load().step_s > FIXED_S + 6 * ROW_S + 3 * draft.step_s

    with subtests.test("no more drafts than a step may have"):
        rank = Rank(max_step_drafts=3, drafting=ModelDrafter(ScriptedDraft(lambda: rank, 1.0), 4, 5))
        rank.core.runner = runner = TimedRunner(rank)
        most = []
        run = runner.run
        runner.run = lambda chunks: most.append(sum(c.num_drafts for c in chunks)) or run(chunks)
        rank.run([rank.submit([i, 7], 12) for i in range(3)])
        assert 0 < max(most) <= 3
