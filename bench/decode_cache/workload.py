"""The workloads of bench.decode_cache as values: the same requests for every side. Pure.

A workload is conversations, most of a single turn, and how many turns run at once.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.values.rank import Plan

TokenIds = tuple[int, ...]

_FIRST_ID, _END_ID = 4, 500  # of the characters vocabulary, without its special tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """Each turn's prompt is all questions and answers so far, then the next question."""

    name: str
    questions: tuple[TokenIds, ...]
    answer_tokens: int  # of every turn, on every side

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.questions)) + len(self.questions) * self.answer_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """`conversations` start in order; the first `ramp` turns fill the system and are not counted."""

    name: str
    conversations: tuple[Conversation, ...]
    concurrency: int
    ramp: int
    # Of the concurrency, how much the pool holds without sharing; None: every conversation, to its end.
    held_share: float | None
    plans: frozenset[Plan] = frozenset({Plan.REMOTE})
    # A client waits for up to so long, drawn by the turn's name, before it sends one. Without, those that
    # began together stay together, and their prompts queue more the more alike their answers take.
    pause_s: float = 0.0

    @property
    def num_turns(self) -> int:
        return sum(len(conversation.questions) for conversation in self.conversations)

    def pool_pages(self, page_size: int) -> int:
        pages = [-(-conversation.num_tokens // page_size) for conversation in self.conversations]
        if self.held_share is None:
            return sum(pages) + len(pages)
        return max(max(pages), round(self.held_share * self.concurrency * sum(pages) / len(pages)))


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids by name: the same name, the same ids."""

    seed: int

    def take(self, name: str, count: int) -> TokenIds:
        rng = random.Random(f"{self.seed}/{name}")
        return tuple(rng.randrange(_FIRST_ID, _END_ID) for _ in range(count))


def shared(seed: int, quick: bool = False) -> Workload:
    """PR 19746: one long context shared by all, prefix to suffix 11 to 1; the pool holds 0.29 of them: 9."""
    concurrency, prefix, suffix, answer = (8, 352, 32, 8) if quick else (31, 2112, 192, 160)
    ids = Ids(seed)
    context = ids.take("context", prefix)
    conversations = tuple(
        Conversation(f"{i}", (context + ids.take(f"suffix/{i}", suffix),), answer)
        for i in range(3 * concurrency)
    )
    return Workload("shared", conversations, concurrency, concurrency, held_share=0.29)


def groups(seed: int, quick: bool = False) -> Workload:
    """PR 22234: groups of 8 that share a system prompt of 7 times the question, shuffled.

    Lengths are drawn between half (range ratio 0.5) and all of what is named; the pool holds 0.6 of them.
    """
    concurrency, question, answer, num_groups = (4, 32, 16, 2) if quick else (16, 128, 256, 10)
    ids, rng = Ids(seed), random.Random(seed)
    conversations = []
    for group in range(num_groups):
        system = ids.take(f"system/{group}", _between_half_and_all(7 * question, rng))
        for member in range(8):
            own = ids.take(f"question/{group}/{member}", _between_half_and_all(question, rng))
            answer_tokens = _between_half_and_all(answer, rng)
            conversations.append(Conversation(f"{group}-{member}", (system + own,), answer_tokens))
    rng.shuffle(conversations)
    return Workload("groups", tuple(conversations), concurrency, concurrency, held_share=0.6)


def turns(seed: int, quick: bool = False) -> Workload:
    """Private conversations whose context grows: 91 % of a prompt is their own past. The pool holds all."""
    count, num_turns, concurrency = (4, 3, 2) if quick else (20, 7, 8)
    first, question, answer = (128, 24, 8) if quick else (512, 96, 64)
    ids = Ids(seed)
    conversations = tuple(
        Conversation(
            f"{i}",
            tuple(ids.take(f"{i}/{turn}", question if turn else first) for turn in range(num_turns)),
            answer,
        )
        for i in range(count)
    )
    return Workload("turns", conversations, concurrency, ramp=count, held_share=None, plans=frozenset(Plan))


def idle(seed: int, concurrency: int, hits: bool, quick: bool = False) -> Workload:
    """A few requests in an ample pool; with `hits` they have 3/4 of the prompt in common."""
    prefix, suffix, answer = (96, 32, 8) if quick else (384, 128, 48)
    ids = Ids(seed)
    name = f"idle-{concurrency}-{'hits' if hits else 'no-hits'}"
    conversations = tuple(
        Conversation(
            f"{name}-{i}",
            (
                ids.take(f"{name}/common" if hits else f"{name}/{i}/prefix", prefix)
                + ids.take(f"{name}/{i}", suffix),
            ),
            answer,
        )
        for i in range(3 * concurrency)
    )
    return Workload(
        name, conversations, concurrency, ramp=concurrency, held_share=None, pause_s=0.02 if quick else 0.5
    )


def warm_up(seed: int, plan: Plan, quick: bool = False) -> Workload:
    """Makes both ranks measure what they do: the router's price rests on it. Prompts of one whole chunk."""
    length, answer = (128, 4) if quick else (512, 16)
    ids = Ids(seed)
    conversations = tuple(
        Conversation(f"warm-up-{plan.value}-{i}", (ids.take(f"{plan.value}/{i}", length),), answer)
        for i in range(4)
    )
    return Workload("warm-up", conversations, 2, ramp=0, held_share=None, plans=frozenset({plan}))


def renamed(workload: Workload, suffix: str) -> Workload:
    """The same requests under other names: request ids are never used twice."""
    conversations = tuple(replace(c, name=f"{c.name}{suffix}") for c in workload.conversations)
    return replace(workload, conversations=conversations)


def prompt_of(conversation: Conversation, answers: Sequence[TokenIds]) -> TokenIds:
    """The prompt of the turn that follows `answers`."""
    prompt: list[int] = []
    for question, answer in zip(conversation.questions, answers, strict=False):
        prompt += question + answer
    return (*prompt, *conversation.questions[len(answers)])


def _between_half_and_all(length: int, rng: random.Random) -> int:
    return rng.randint(length // 2, length)
