"""Pairs whose decode rank drafts: what they are led through, and all that others can be compared in.

Two pairs that were led through the same have said, reused and kept the same, to the bit.
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from engine.paged.draft_ranks import drafts_of
from engine.pair import Pair, core_of, eager
from engine.torch.paired.families import new_text, torch_settings
from exactness.checkpoints import tiny_checkpoint
from exactness.draft_checkpoints import faint_checkpoint, grown_checkpoint, last_token_draft
from services.kv.block_hash import unpack_tokens
from services.values.rank import Plan
from services.values.request import FinishReason, SamplingParams, TokenLogprobs

FULL, WINDOWED, MAMBA, DELTA_NET = "llama", "gemma3", "falcon_h1", "qwen3_5"
FAMILIES = [FULL, WINDOWED, MAMBA, DELTA_NET]
MODES = ["tree", "draft"]
GREEDY = SamplingParams(temperature=0, logprobs=2)
SEEDED = SamplingParams(temperature=0.4, top_p=0.95, seed=11, logprobs=2)  # its texts part after some tokens
PLANS = [Plan.REMOTE, Plan.LOCAL, Plan.REMOTE]
NEW = [50, 5, 30]  # tokens of each turn
ANSWER, REGENERATED = 24, 8
CROWD, IN_CROWD = 6, 56


def settings_of(family, mode, **changes):
    """`draft`: of a target that a small model foretells half of the time or more; prefill has that, too."""
    if mode == "draft":
        is_full = family == FULL
        target = grown_checkpoint(gain=2.0) if is_full else faint_checkpoint(family)
        draft = tiny_checkpoint() if is_full else last_token_draft(family)
        changes |= {"model": str(target), "draft_model": str(draft)}
    return torch_settings(family, speculation=mode, **{"kv_pages": 160, **changes})


def without_drafts(settings):
    return replace(settings, speculation="off", draft_model="")


# What they say


@dataclass(frozen=True, slots=True)
class Said:
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finished: FinishReason
    hits: tuple[int, int]  # tokens, on decode and on prefill


async def say(pair, prompt, max_tokens=ANSWER, plan=Plan.REMOTE, *, decode=0, **request):
    tokens, logprobs, admitted, finished = [], [], None, None
    async with pair.outputs(pair.request(prompt, max_tokens, plan, **request), decode) as outputs:
        async for output in outputs:
            tokens += output.token_ids
            logprobs += output.logprobs
            admitted, finished = admitted or output.admitted, output.finished
    hits = admitted.decode_prefix_len, admitted.prefill_prefix_len
    return Said(tuple(tokens), tuple(logprobs), finished, hits)


async def converse(pair, sampling, salt, *, turns=3, regenerations=0):
    """Gives what was said, turn by turn: an answer, and others that are drawn in its place."""
    said, ids = [], []
    for turn in range(turns):
        ids += new_text(NEW[turn], turn)
        request = {"plan": PLANS[turn], "cache_salt": salt}
        answers = [await say(pair, ids, sampling=sampling, **request)]
        for other in range(regenerations):
            drawn = replace(SEEDED, seed=20 + other)
            answers.append(await say(pair, ids, REGENERATED, sampling=drawn, **request))
        said += answers
        ids += answers[0].tokens
    return said


async def repeat_two_turns(pair):
    first = await converse(pair, SEEDED, "salt", turns=2)
    return first + await converse(pair, SEEDED, "salt", turns=2, regenerations=3)


async def repeat_turns(pair):
    """Greedy and drawn: a conversation, and the same again with other answers in between."""
    return [answer for sampling in (GREEDY, SEEDED) for answer in await _repeat(pair, sampling)]


async def repeat_drawn_turns(pair):
    return await _repeat(pair, SEEDED)


async def _repeat(pair, sampling):
    salt = str(sampling)
    return await converse(pair, sampling, salt) + await converse(pair, sampling, salt, regenerations=4)


async def meet_limits(pair):
    """An answer, and then all that ends it earlier or changes what may be chosen: drafts go on as it did."""
    said = []
    for sampling in (GREEDY, SEEDED):
        prompt, salt = new_text(40, 1), str(sampling)
        whole = await say(pair, prompt, sampling=sampling, cache_salt=salt)
        said.append(whole)
        for number, (changes, fields) in enumerate(_limits(whole.tokens)):
            request = {"plan": list(Plan)[number % 2], "cache_salt": salt, **fields}
            said.append(await say(pair, prompt, sampling=replace(sampling, **changes), **request))
    return said


def _limits(tokens):
    """Changes of the sampling, and other fields of the request."""
    for at in (3, 13):
        yield {"stop_token_ids": (tokens[at],)}, {}
        for min_tokens in (at, at + 4):  # just not too few, and too few
            yield {"stop_token_ids": (tokens[at],), "min_tokens": min_tokens}, {}
        yield {}, {"eos_token_ids": (tokens[at],)}
        yield {"ignore_eos": True}, {"eos_token_ids": (tokens[at],)}
        yield {}, {"max_tokens": at + 1}
    for name, penalty in (("repetition_penalty", 1.3), ("frequency_penalty", 1.0), ("presence_penalty", 1.0)):
        yield {name: penalty}, {}
        yield {name: penalty}, {}  # the tree knows that text, too
    for changes in ({"logprobs": None}, {"logprobs": 5}, {"top_k": 3}, {"min_p": 0.1}):
        yield changes, {}


def crowded(settings):
    """10 pages for 6 sequences that need 6 each, and no more states and windows than running ones take."""
    carried = {"state_slots": 2 * CROWD, "window_pages": 4 * CROWD}
    return eager(replace(settings, kv_pages=10, max_running_requests=CROWD, **carried))


async def crowd(pair):
    """Each alone, and given up before its end, from which a rank learns what is said and not how long; then
    all at once, some drawn otherwise. What is reused depends on who comes first: of that nothing is told."""
    for number in range(CROWD):
        async with aclosing(_crowded_request(pair, number, IN_CROWD + 20, seed=12)) as outputs:
            tokens = 0
            while tokens < IN_CROWD:
                tokens += len((await anext(outputs)).token_ids)
    answers = await asyncio.gather(*(_all_of(_crowded_request(pair, n, IN_CROWD)) for n in range(CROWD)))
    assert pair.decode.load().retractions > 0
    return answers


async def _all_of(outputs):
    said = [output async for output in outputs]
    return [token for output in said for token in output.token_ids], said[-1].finished


async def _crowded_request(pair, number, max_tokens, seed=11):
    sampling = GREEDY if number % 2 else replace(SEEDED, seed=seed)
    prompt, plan = new_text(20 + number, 10 + number), list(Plan)[number // 2 % 2]
    request = pair.request(prompt, max_tokens, plan, sampling=sampling, cache_salt="crowd")
    async with pair.outputs(request) as outputs:
        async for output in outputs:
            yield output


# What they keep


def memory_of(engine) -> dict[tuple[str, tuple[int, ...]], tuple[bytes, ...]]:
    """Return an idle rank's memory by salt and ids: the bytes of each page, and what its end keeps."""
    core = core_of(engine)
    points, layout = core.carried.points._kept, core.runner.layout
    memory: dict[Any, Any] = {}
    for node in core.cache._tree.nodes():
        units = [(0, node.page), *(_units(layout, points[node].point) if node in points else ())]
        read = (next(core.runner.read_pages([unit], group)) for group, unit in units)
        memory[node.scope.salt, _path(node)] = tuple(map(bytes, read))
    return memory


def _units(layout, point):
    for group, pages in enumerate(point.tails, 1):
        yield from ((group, page) for page in pages)
    if point.slot is not None:
        yield len(layout.carried), point.slot


def _path(node):
    return (*_path(node.parent), *unpack_tokens(node.key)) if node.parent is not None else ()


# How they compare


@dataclass(frozen=True)
class Led:
    said: Any
    memory: Any
    accepted: int
    rejected: int

    def differences(self, other):
        if self.memory.keys() != other.memory.keys() or self.memory != other.memory:
            yield "memory"
        for ours, theirs in zip(self.said, other.said, strict=True):
            yield from (name for name in Said.__slots__ if getattr(ours, name) != getattr(theirs, name))


async def lead(settings, scenario, keeps_memory=True):
    async with Pair(settings) as pair:
        said = await scenario(pair)
        await pair.assert_nothing_held()
        return Led(said, memory_of(pair.decode) if keeps_memory else {}, *drafts_of(pair.decode))


async def compare(settings, scenario, keeps_memory=True, num_rejected=10):
    """Leads a pair with drafts and one without through `scenario`; gives what they said."""
    plain = await lead(without_drafts(settings), scenario, keeps_memory)
    drafted = await lead(settings, scenario, keeps_memory)
    assert (plain.accepted, plain.rejected) == (0, 0)
    assert drafted.said == plain.said
    assert drafted.memory.keys() == plain.memory.keys()
    assert [key for key, kept in drafted.memory.items() if plain.memory[key] != kept] == []
    assert drafted.accepted >= 20 and drafted.rejected >= num_rejected, (drafted.accepted, drafted.rejected)
    return plain.said
