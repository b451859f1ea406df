"""Small checkpoints of the families, pairs that serve them, and conversations checked token by token."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bench.families import FAMILIES
from engine.pair import FAKE, Pair, core_of
from exactness.checkpoints import tiny_checkpoint
from exactness.plain_sampling import sample_row
from exactness.reference import count_near_ties, forced_logits, random_prompt, reference_generation
from services.engine.paged.model_runner import Chunk
from services.kv.tails import carried_bytes
from services.values.errors import Unavailable
from services.values.rank import Plan
from services.values.request import SamplingParams

WINDOWED_MISTRAL = "mistral-window"
SERVED = [WINDOWED_MISTRAL, *(name for name in FAMILIES if name != "jamba")]
RECURRENT = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "falcon_h1", "bamba"]
WITH_WINDOWS = ["gpt_oss", "gemma3", "gemma4", "llama4"]
CARRYING = RECURRENT + WITH_WINDOWS
GREEDY = SamplingParams(temperature=0)


def checkpoint(family):
    return tiny_checkpoint("mistral", window=24) if family == WINDOWED_MISTRAL else tiny_checkpoint(family)


def torch_settings(family, **changes):
    settings = replace(
        FAKE,
        engine="torch",
        model=str(checkpoint(family)),
        page_size=16,
        index_block=16,
        kv_pages=64,
        chunk_size=24,
    )
    return replace(settings, **changes)


@dataclass
class Talk:
    """One conversation with a pair, each answer compared with what transformers generates from the whole."""

    pair: Pair
    ids: list[int] = field(default_factory=list)
    near_ties: int = 0
    decode_prefixes: list[int] = field(default_factory=list)  # under remote, turn by turn

    async def turn(self, new_ids, plan=Plan.REMOTE, max_tokens=9, **where):
        self.ids += new_ids
        answer = await self.pair.generate(self.ids, max_tokens, plan, **where)
        self.check(self.ids, answer)
        if plan is Plan.REMOTE:
            self.decode_prefixes.append(answer.admitted.decode_prefix_len)
            check_bytes(self.pair, len(self.ids), answer.admitted)
        self.ids += answer.tokens
        return answer

    def check(self, prompt_ids, answer):
        assert len(answer.tokens) > 0
        if self.pair.settings.engine == "torch":
            directory = Path(self.pair.settings.model)
            reference = reference_generation(directory, tuple(prompt_ids), len(answer.tokens))
            self.near_ties += count_near_ties(reference, answer.tokens)

    def branch(self, length):
        """Another one, that has begun so."""
        return Talk(self.pair, self.ids[:length])


def check_bytes(pair, prompt_len, admitted):
    """The delta of attention, and all of what is carried at the prompt's end; nothing else."""
    layout = pair.decode.layout
    due = carried_bytes(layout, prompt_len)
    delta = -(-prompt_len // layout.page_size) - admitted.decode_prefix_len // layout.page_size
    assert admitted.kv_bytes_moved == delta * layout.page_bytes + due
    assert sum(admitted.carried_bytes.values()) == due
    assert (due > 0) == bool(layout.carried)


def sampled_as_plain(pair, prompt_ids, token_ids, sampling):
    """Draw, by definition, from transformers' logits after the prompt and each of `token_ids`."""
    logits = forced_logits(Path(pair.settings.model), prompt_ids, token_ids).numpy()
    chunks = (
        Chunk([0], 0, [0], True, sampling, [*prompt_ids, *token_ids[:i]], i) for i in range(len(token_ids))
    )
    return [sample_row(row, chunk).token_id for row, chunk in zip(logits, chunks, strict=True)]


async def die_after(pair, request, count):
    """Tokens that came from the first decode rank, which is stopped once `count` are there."""
    tokens, stops = [], []
    async with pair.outputs(request) as outputs:
        with pytest.raises(Unavailable):
            async for output in outputs:
                tokens += output.token_ids
                if len(tokens) >= count and not stops:
                    stops.append(asyncio.create_task(pair.decodes[0].stop()))
    await asyncio.gather(*stops)
    return tokens


def evict_checkpoints(pair):
    """Evict them on every rank, and return how many there were."""
    engines = (*pair.decodes, *pair.prefills)
    count = sum(len(core_of(engine).carried.points) for engine in engines)
    for engine in engines:
        while core_of(engine).carried.points.evict():
            pass
    return count


async def send_below(pair):
    """Have every rank store in its tier all that is cached, and then evict it."""
    for engine in (*pair.decodes, *pair.prefills):
        core = core_of(engine)
        core.tiers.storing._room_pages = core.cache.num_pages + 1
        async with asyncio.timeout(30):
            engine.post(lambda core: None)
            await asyncio.sleep(0.05)
            while core.tiers.idle_s is not None or core.tiers.storing._pages or core.tiers.storing._point_of:
                await asyncio.sleep(0.01)
        core.cache.clear()  # Its checkpoints go with it.
        assert not len(core.carried.points) and not core.cache.books().cached


def new_text(length, seed):
    return list(random_prompt(length, seed))
