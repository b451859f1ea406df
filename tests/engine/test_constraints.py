"""Answers of random models under constraints, over both of our engines: whole, and the same with drafts, too.

The vocabulary of `bytes` can write any text; in `characters` an id is a character.
"""

import asyncio
import itertools
import json
import re
from dataclasses import replace
from itertools import cycle

import pytest

from engine.paged.core_rank import Guesses
from engine.pair import FAKE, Pair, core_of, eager
from exactness.checkpoints import tiny_checkpoint
from grammar.written import text_of
from services.engine.engine_config import EngineConfig
from services.grammar.vocabulary import read_vocabulary
from services.values.errors import InvalidRequest, PeerFailed
from services.values.rank import Plan
from services.values.request import Constraint, ConstraintKind, FinishReason, SamplingParams

PROMPT = tuple(range(10, 31))
FLAT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "b", None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


def constraint(kind: str, *texts: str) -> Constraint:
    return Constraint(ConstraintKind(kind), texts)


def is_flat(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "kind", "sizes"]
    assert len(value["name"]) <= 6 and value["kind"] in ("a", "b", None)
    return len(value["sizes"]) <= 3 and all(0 <= size <= 99 for size in value["sizes"])


CASES = [
    (constraint("json_schema", json.dumps(FLAT)), is_flat),
    (constraint("regex", r"[a-f]{4}-(0|1){2,9}"), re.compile(r"[a-f]{4}-[01]{2,9}").fullmatch),
    (constraint("choice", "yes", "yesterday", "no"), {"yes", "yesterday", "no"}.__contains__),
    (constraint("grammar", 'root ::= "(" ("x" | root) ")"'), re.compile(r"\(+x\)+").fullmatch),
]


def settings_of(engine: str, tokenizer: str = "bytes") -> EngineConfig:
    directory = tiny_checkpoint(tokenizer=tokenizer)
    return replace(FAKE, engine=engine, model=str(directory), kv_pages=256)


class Asking:
    """Of one pair of ranks."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.vocabulary = read_vocabulary(tiny_checkpoint(tokenizer="bytes"), 512)
        self.end = 256

    async def answer(self, wanted: Constraint, plan: Plan, max_tokens: int = 120, seed: int = 0, **fields):
        sampling = SamplingParams(temperature=3.0, seed=seed, constraint=wanted, logprobs=1)
        fields = {"eos_token_ids": (self.end,), "sampling": sampling, **fields}
        return await self.pair.generate((*PROMPT, 10 + seed), max_tokens, plan, **fields)

    def text(self, tokens: list[int]) -> str:
        """Of an answer that has stopped, whose last id says so."""
        assert tokens[-1] == self.end
        return text_of(self.vocabulary, tokens[:-1])


@pytest.mark.parametrize(
    ("engine", "plan"),
    [
        ("fake", Plan.LOCAL),
        pytest.param("fake", Plan.REMOTE, marks=pytest.mark.exact),
        pytest.param("torch", Plan.LOCAL, marks=pytest.mark.exact),
        ("torch", Plan.REMOTE),
    ],
)
async def test_what_stops_is_whole_with_drafts_as_without(engine, plan):
    async with Pair(settings_of(engine)) as pair:
        asking, plain = Asking(pair), {}
        for index, (wanted, is_valid) in enumerate(CASES):
            for seed in range(4):
                got = await asking.answer(wanted, plan, seed=seed)
                plain[index, seed] = got.tokens
                assert got.finished is FinishReason.STOP
                assert is_valid(asking.text(got.tokens)), asking.text(got.tokens)
        assert len(set(map(tuple, plain.values()))) > len(CASES) + 4

        guesses = Guesses(lambda ids, count: right(plain.values(), ids, count), cycle([3, 0, 2, 5]))
        core_of(pair.decode)._drafting = guesses
        for (index, seed), tokens in plain.items():
            assert (await asking.answer(CASES[index][0], plan, seed=seed)).tokens == tokens
        assert sum(accepted for noted in guesses.noted.values() for _, accepted in noted) > 20
        await pair.assert_nothing_held()


def right(answers, ids, count):
    """What follows in the answer that `ids` go on with, or something wrong."""
    said = list(ids[len(PROMPT) + 1 :])
    for tokens in answers:
        if tokens[: len(said)] == said and len(tokens) > len(said):
            return (tokens[len(said) :] + [7] * count)[:count]
    return [7] * count


async def test_an_answer_goes_on_after_it_was_left_or_retracted(subtests):
    for engine in ["fake", "torch"]:
        with subtests.test("an answer goes on where another rank left it", engine=engine):
            wanted, _ = CASES[0]
            async with Pair(settings_of(engine)) as pair:
                asking = Asking(pair)
                whole = await asking.answer(wanted, Plan.REMOTE)
                for plan in Plan:
                    for said in (1, 7, len(whole.tokens) - 1):
                        so_far = tuple(whole.tokens[:said])
                        rest = await asking.answer(wanted, plan, output_ids_so_far=so_far)
                        assert [*so_far, *rest.tokens] == whole.tokens
                        assert rest.finished is FinishReason.STOP
                await pair.assert_nothing_held()
    with subtests.test("an answer goes on after it has given its pages to others"):
        wanted, is_valid = CASES[0]
        async with Pair(eager(replace(settings_of("fake"), kv_pages=30))) as pair:
            asking = Asking(pair)
            seeds = range(6)
            alone = [(await asking.answer(wanted, Plan.LOCAL, 70, seed)).tokens for seed in seeds]
            before = pair.decode.load().retractions
            asked = (asking.answer(wanted, Plan.LOCAL, 70, seed) for seed in seeds)
            together = [answer.tokens for answer in await asyncio.gather(*asked)]
            assert pair.decode.load().retractions > before
            assert together == alone and all(is_valid(asking.text(tokens)) for tokens in together)
            await pair.assert_nothing_held()


async def end_where_nothing_may_follow(engine, plan):
    wanted, is_valid = CASES[1]
    async with Pair(settings_of(engine)) as pair:
        asking = Asking(pair)
        core_of(pair.decode)._drafting = Guesses(lambda ids, count: [*range(count)], cycle([2]))
        plain = await asking.answer(wanted, plan, eos_token_ids=())
        assert not core_of(pair.decode)._drafting.noted  # what is forbidden is not verified
        assert plain.finished is FinishReason.STOP
        assert is_valid(text_of(asking.vocabulary, plain.tokens))
        assert len(plain.tokens) == 14  # [01]{2,9} has no end but this
        core_of(pair.decode)._drafting = Guesses(
            lambda ids, count: right([plain.tokens], ids, count), cycle([4])
        )
        assert (await asking.answer(wanted, plan, eos_token_ids=())).tokens == plain.tokens
        await pair.assert_nothing_held()


async def test_what_cannot_be_kept_to_is_refused_or_fails(subtests):
    for plan in Plan:
        with subtests.test("what cannot be kept to is refused before anything is held", plan=plan):
            async with Pair(settings_of("fake")) as pair:
                for wanted in (constraint("json_schema", '{"not": {}}'), constraint("regex", "(")):
                    with pytest.raises(
                        InvalidRequest, match=r"^sampling\.constraint\.[a-z_]+ is not supported: "
                    ):
                        await Asking(pair).answer(wanted, plan)
                with pytest.raises(InvalidRequest, match=r"^sampling\.constraint: "):
                    await Asking(pair).answer(CASES[2][0], plan, output_ids_so_far=(5,))
                await pair.assert_nothing_held()
    # The vocabulary has no line break. What is nothing but a way there is refused when it is compiled.
    for plan, engine in itertools.product(Plan, ["fake", "torch"]):
        with subtests.test("where no token can go on the request ends in an error", plan=plan, engine=engine):
            async with Pair(settings_of(engine, "characters")) as pair:
                for pattern, num_tokens in ((r"[ab]\n", 1), (r"a[bc]\nb", 2), (r"[ab]b{4}\n", 5)):
                    said = []
                    with pytest.raises(InvalidRequest, match=r"^sampling\.constraint: "):
                        sampling = SamplingParams(constraint=constraint("regex", pattern))
                        async with pair.outputs(pair.request(PROMPT, 20, plan, sampling=sampling)) as outputs:
                            async for output in outputs:
                                said += output.token_ids
                    assert len(said) == num_tokens
                await pair.assert_nothing_held()
    with subtests.test("a first token that the constraint forbids is prefills failure"):
        async with Pair(settings_of("fake")) as pair:
            prefill = pair.prefill.prefill

            async def wrong(request, rendezvous):
                return replace(await prefill(request, rendezvous), first_token_id=7)

            pair.prefill.prefill = wrong
            with pytest.raises(PeerFailed, match="token 7, which the constraint does not allow"):
                await Asking(pair).answer(CASES[2][0], Plan.REMOTE)
            await pair.assert_nothing_held()


async def test_what_ends_an_answer(subtests):
    for engine in ["fake", "torch"]:
        with subtests.test("an answer that may go on ends by its length", engine=engine):
            async with Pair(settings_of(engine)) as pair:
                asking = Asking(pair)
                got = await asking.answer(constraint("regex", "a+b"), Plan.LOCAL, 1)
                assert got.finished is FinishReason.LENGTH
                assert text_of(asking.vocabulary, got.tokens) == "a"
    for plan, engine in itertools.product(Plan, ["fake", "torch"]):
        with subtests.test(
            "without an id for it an answer ends where nothing may follow", plan=plan, engine=engine
        ):
            await end_where_nothing_may_follow(engine, plan)


async def test_the_raw_logits_are_what_is_told_of():
    """Greedy among what is allowed; what is told is as probable as it was without the constraint."""
    async with Pair(settings_of("torch")) as pair:
        asking = Asking(pair)
        sampling = SamplingParams(temperature=0, logprobs=3)
        free = await first_logprobs(pair, sampling)
        digits = [asking.vocabulary.pieces.index(str(digit).encode()) for digit in range(10)]
        wanted = replace(sampling, constraint=constraint("regex", "[0-9]"))
        told = await first_logprobs(pair, wanted)
        assert told.token_id in digits and told.token_id != free.token_id
        assert told.top == free.top
        assert told.logprob < free.top[-1][1]


async def first_logprobs(pair, sampling):
    async with pair.outputs(pair.request(PROMPT, 1, Plan.LOCAL, sampling=sampling)) as outputs:
        async for output in outputs:
            return output.logprobs[0]
