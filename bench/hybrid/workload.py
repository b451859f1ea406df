"""What clients ask of models with states and windows. Pure."""

import random
from dataclasses import replace

from bench import cache_workload
from bench.cache_workload import Conversation, Ids, Workload
from services.values.rank import Plan

GROUPS_AT_ONCE = 4
_MEMBERS = 8


def conversations(seed: int, quick: bool = False) -> Workload:
    """Private ones whose context grows, as in bench.decode_cache, and fewer of them; memory holds all."""
    workload = cache_workload.turns(seed, quick)
    kept = workload.conversations[: 4 if quick else 10]
    plans = frozenset({Plan.REMOTE})
    return replace(workload, name="conversations", conversations=kept, ramp=len(kept), plans=plans)


def documents(seed: int, context: int, quick: bool = False) -> Workload:
    """Groups of 8 that ask about one long document; four documents are asked about at any time.

    Memory holds 0.29 of the clients' requests where each has its own copy, as in `shared`.
    """
    concurrency, num_groups, question, answer = (16, 4, 16, 8) if quick else (24, 12, 192, 96)
    ids, rng = Ids(seed), random.Random(seed)
    asked: list[Conversation] = []
    for first in range(0, num_groups, GROUPS_AT_ONCE):
        batch = [
            _question(ids, group, member, context, question, answer)
            for group in range(first, min(num_groups, first + GROUPS_AT_ONCE))
            for member in range(_MEMBERS)
        ]
        rng.shuffle(batch)
        asked += batch
    return Workload("documents", tuple(asked), concurrency, concurrency, held_share=0.29)


def _question(ids: Ids, group: int, member: int, context: int, question: int, answer: int) -> Conversation:
    document, own = ids.take(f"document/{group}", context), ids.take(f"question/{group}/{member}", question)
    return Conversation(f"{group}-{member}", (document + own,), answer)


def mixed(seed: int, quick: bool = False) -> Workload:
    """Conversations, groups that share a system prompt, and long prompts that nobody repeats, shuffled."""
    parts = 1 if quick else 2
    asked: list[Conversation] = []
    for part in range(parts):
        for workload in (cache_workload.turns(seed + part, quick), cache_workload.groups(seed + part, quick)):
            asked += [replace(c, name=f"{workload.name}{part}/{c.name}") for c in workload.conversations]
    ids, rng = Ids(seed), random.Random(seed)
    asked += [Conversation(f"once/{i}", (ids.take(f"once/{i}", 1024),), 64) for i in range(len(asked) // 5)]
    rng.shuffle(asked)
    return Workload("mixed", tuple(asked), 16, 0, held_share=None, plans=frozenset({Plan.REMOTE}))


def points_in_use(workload: Workload) -> int:
    """Resume points that are wanted at some time: one a conversation with turns, one a shared beginning."""
    beginnings = [c.questions[0][:64] for c in workload.conversations]
    of_turns = sum(len(c.questions) > 1 for c in workload.conversations)
    return of_turns + sum(beginnings.count(beginning) > 1 for beginning in set(beginnings))
