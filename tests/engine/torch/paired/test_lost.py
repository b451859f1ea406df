"""Carried wrongly between ranks or kept wrongly for later, states and tails change tokens: it would be seen.

Each fault is made once two conversations have had two turns; without one the third is right.
"""

import re
from dataclasses import replace

import pytest

from engine.pair import Pair, core_of
from engine.torch.paired.families import (
    RECURRENT,
    Talk,
    evict_checkpoints,
    new_text,
    torch_settings,
)
from services.engine.paged.shell import transferring_engine
from services.engine.torch.pools import SlotPool
from services.kv.carried_cache import CarriedCache
from services.transfer.sending import delta_write
from services.values.rank import Plan

# New tokens and answers: then prefill has checkpoints at 64 and 80, decode at 80 and 112. At none of these
# a chunk of 24 begins, for there nothing is carried.
TURNS = ((67, 16), (7, 30))
# Of each kind of memory; the faults are those of what all families share.
CASES = [
    ("qwen3_5", Plan.REMOTE),
    ("falcon_h1", Plan.REMOTE),
    ("bamba", Plan.LOCAL),
    ("gemma3", Plan.REMOTE),
    ("gpt_oss", Plan.REMOTE),
    ("gpt_oss", Plan.LOCAL),
]


async def notices(pair, fault, plan, seed):
    """Tell whether a conversation goes on wrongly under `fault`.

    Another one of its length has been held before, in pools whose slots have all been used.
    """
    evict_checkpoints(pair)
    talk, other = Talk(pair), Talk(pair)
    for number, (length, max_tokens) in enumerate(TURNS):
        await talk.turn(new_text(length, seed + number), max_tokens=max_tokens)
        await other.turn(new_text(length, seed + 10 + number), max_tokens=max_tokens)
    fill_slots(pair)
    talk.ids += new_text(6, seed + 20)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        answer = await pair.generate(talk.ids, 12, plan)
    try:
        talk.check(talk.ids, answer)
    except AssertionError as error:
        assert re.search(r"token \d+ is \d+, not", str(error))
        return True
    return False


def fill_slots(pair):
    """Fill what nobody holds with a state that is not small."""
    for engine in (pair.decode, pair.prefill):
        core = core_of(engine)
        if (slots := core.runner._pools.slots) is not None:
            units = core.carried._recurrent.units
            free = [unit for unit in range(units.num_units) if not units.holders_of(unit)]
            for state in slots.of_state.values():
                state[free] += 0.5


def nothing(patch):
    pass


def copies_nothing(patch):
    """A resumed sequence goes on with what its slot was left with."""
    patch.setattr(SlotPool, "copy", lambda *_: None)


def goes_on_with(patch, choose):
    """A resumed sequence goes on with what `choose(points, point)` makes of the point that it should."""
    go_to = CarriedCache._go_to

    def mutated(cache, seq, point):
        go_to(cache, seq, point and choose(cache.points, point))

    patch.setattr(CarriedCache, "_go_to", mutated)


def resumes_a_block_off(patch):
    """It resumes with the state and the tails of the point above the one it goes on at."""

    def choose(points, point):
        node = next(node for node, kept in points._kept.items() if kept.point is point)
        above = points.deepest(node.parent)
        assert above.position < point.position
        return replace(above, position=point.position, tails=moved(above, point))

    goes_on_with(patch, choose)


def moved(above, point):
    return tuple(
        (pages + pages[-1:] * len(wanted))[: len(wanted)]
        for pages, wanted in zip(above.tails, point.tails, strict=True)
    )


def resumes_another_branch(patch):
    def choose(points, point):
        others = [other for other in points if other.position == point.position and other is not point]
        return others[0]

    goes_on_with(patch, choose)


def resumes_without_the_first_page(patch):
    """A page of another point is in the place of its tails' first one."""

    def choose(points, point):
        held = {page for pages in point.tails for page in pages}
        strange = next(other.tails for other in points if not held.intersection(*other.tails))
        tails = zip(point.tails, strange, strict=True)
        return replace(point, tails=tuple((theirs[0], *pages[1:]) for pages, theirs in tails))

    goes_on_with(patch, choose)


def sends_the_last_border(patch):
    """The state up to there, instead of the one at the prompt's end."""
    units_of = CarriedCache.units_of

    def mutated(cache, seq):
        units = units_of(cache, seq)
        newest = list(cache.points)[-1] if len(cache.points) else None
        assert newest is None or newest.position < seq.position or seq.position % 16 == 0
        return (*units[:-1], (newest.slot,)) if newest is not None else units

    patch.setattr(CarriedCache, "units_of", mutated)


def sends_another_unit(patch):
    """First of its tail, or for its state; and nobody compares digests."""
    merge_moves = delta_write.merge_moves

    def mutated(sources, targets, group):
        if group > 0 and sources:
            sources = [sources[0] ^ 1, *sources[1:]]
        return merge_moves(sources, targets, group)

    patch.setattr(delta_write, "merge_moves", mutated)
    patch.setattr(transferring_engine, "is_sampled", lambda transfer_id, share: False)


RESUMES = (resumes_a_block_off, resumes_another_branch)
OF_STATES = (copies_nothing, *RESUMES)
OF_STATES_SENT = (sends_the_last_border, sends_another_unit)
OF_WINDOWS = (*RESUMES, resumes_without_the_first_page)


def faults_of(family, plan):
    if family in RECURRENT:
        return OF_STATES + OF_STATES_SENT if plan is Plan.REMOTE else OF_STATES
    return (*OF_WINDOWS, sends_another_unit) if plan is Plan.REMOTE else OF_WINDOWS


@pytest.mark.exact
@pytest.mark.parametrize(("family", "plan"), CASES)
async def test_what_is_lost_or_mixed_up_is_seen(family, plan):
    async with Pair(torch_settings(family, max_running_requests=4)) as pair:
        faults = nothing, *faults_of(family, plan), nothing
        noticed = [await notices(pair, fault, plan, 100 * i) for i, fault in enumerate(faults)]
        expected = [fault is not nothing for fault in faults]
        assert noticed == expected, dict(zip([fault.__name__ for fault in faults], noticed, strict=True))


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.exact)])
async def test_a_slot_that_is_not_zeroed_is_seen(family, monkeypatch):
    async with Pair(torch_settings(family, max_running_requests=2)) as pair:
        await Talk(pair).turn(new_text(67, 1))
        fill_slots(pair)
        monkeypatch.setattr(SlotPool, "zero", lambda *_: None)
        with pytest.raises(AssertionError, match=r"token \d+ is"):
            await Talk(pair).turn(new_text(67, 2))
