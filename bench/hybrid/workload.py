"""This module makes the requests of clients of models with states and windows. It is pure."""

import random
from dataclasses import replace

from bench.decode_cache import workload as workloads
from bench.decode_cache.workload import Conversation, Ids, Workload
from services.values.rank import Plan

GROUPS_AT_ONCE = 4  # that clients of `documents` ask about, as a rule
_MEMBERS = 8


def conversations(seed: int, quick: bool = False) -> Workload:
    """Private ones whose context grows, as in bench.decode_cache, and fewer of them; memory holds all."""
    workload = workloads.turns(seed, quick)
    kept = workload.conversations[: 4 if quick else 10]
    plans = frozenset({Plan.REMOTE})
    return replace(workload, name="conversations", conversations=kept, ramp=len(kept), plans=plans)


def documents(seed: int, context: int, quick: bool = False) -> Workload:
    """Groups of 8 that ask about one long document, each group beside the next one.

    Memory holds 0.29 of the clients' requests where each has its own copy, as in `shared`.
    """
    concurrency, num_groups, question, answer = (16, 4, 16, 8) if quick else (24, 9, 192, 96)
    ids, rng = Ids(seed), random.Random(seed)
    asked = [
        (group + rng.uniform(0, 2), _question(ids, group, member, context, question, answer))
        for group in range(num_groups)
        for member in range(_MEMBERS)
    ]
    in_order = tuple(conversation for _, conversation in sorted(asked, key=lambda each: each[0]))
    return Workload("documents", in_order, concurrency, concurrency, held_share=0.29)


def _question(ids: Ids, group: int, member: int, context: int, question: int, answer: int) -> Conversation:
    document, own = ids.take(f"document/{group}", context), ids.take(f"question/{group}/{member}", question)
    return Conversation(f"{group}-{member}", (document + own,), answer)
