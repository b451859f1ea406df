"""Sequences that go on with texts known beforehand, drafted for, in steps that cost what a formula says."""

import random
from dataclasses import dataclass, field

from services.engine.paged.drafters import Wish
from services.engine.paged.sequence import Sequence
from services.engine.paged.step_time import StepTimes
from services.values.request import GenerationRequest, SamplingParams


def sequence(prompt, answer, salt=""):
    """One that will say `answer`, and has said its first token."""
    request = GenerationRequest("r", tuple(prompt), SamplingParams(), cache_salt=salt)
    seq = Sequence(request, 0)
    seq.ids.append(answer[0])
    return seq


@dataclass
class Replay:
    """`seconds` of a step by its sequences and drafts."""

    drafter: object
    seconds: object
    step_times: StepTimes = field(default_factory=StepTimes)
    took_s: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_s(self):
        return self.tokens / self.took_s

    def run(self, answers, max_drafts=1024, steps=10**6):
        """`answers` by sequence, all at once until each has ended."""
        running = dict(answers)
        while running and steps:
            steps -= 1
            self.step(running, max_drafts)
            for seq in [s for s, answer in running.items() if self.said(s) >= len(answer)]:
                self.drafter.ended(seq)
                del running[seq]

    def step(self, running, max_drafts=1024):
        wishes = [Wish(seq, max(0, len(answer) - self.said(seq) - 1)) for seq, answer in running.items()]
        proposals = self.drafter.propose(wishes, max_drafts, self.step_times)
        drafts = sum(len(p.ids) for p in proposals if p is not None)
        assert drafts <= max_drafts
        for wish, proposal in zip(wishes, proposals, strict=True):
            self._verify(wish, proposal, running[wish.seq])
        took_s = self.seconds(len(wishes), drafts)
        self.step_times.note(len(wishes), 0, took_s, drafts)
        self.took_s, self.drafted = self.took_s + took_s, self.drafted + drafts

    def said(self, seq):
        return len(seq.ids) - len(seq.request.prompt_ids)

    def _verify(self, wish, proposal, answer):
        seq, said = wish.seq, self.said(wish.seq)
        ids = list(proposal.ids) if proposal is not None else []
        assert len(ids) <= wish.most
        right = next((i for i, x in enumerate(ids) if x != answer[said + i]), len(ids))
        seq.ids += answer[said : said + right + 1]
        self.tokens += right + 1
        self.accepted += right
        if proposal is not None:
            self.drafter.note(seq, proposal, right)


def novel(length, seed=0):
    """A text in which hardly three ids meet again."""
    chance = random.Random(seed)
    return [chance.randrange(50_000) for _ in range(length)]


def echoing(prompt, length, right, seed=0):
    """A text that copies the prompt, but for one id in so many: of the others `right` are as copied."""
    chance = random.Random(seed)
    return [
        prompt[i % len(prompt)] if chance.random() < right else chance.randrange(50_000)
        for i in range(length)
    ]
