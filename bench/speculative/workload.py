"""The workloads say whose text is guessed by whom. They are made up: no trace that is at hand has token ids.

repeats     the prompt has shown every circle: the sequence's own n-grams know what follows
resembles   short prompts; what others of the salt were answered has shown the circles
agrees      short prompts, a salt for each; a small model has the same circles
never       as agrees, and the small model has other circles
noise       no circles at all: whatever n-gram is found says nothing
"""

import random
from dataclasses import dataclass, replace

from bench.speculative.models import FIRST_ID, VOCAB_SIZE, circles, successors
from services.engine.paged.drafters import Mode
from services.values.rank import Plan
from services.values.request import GenerationRequest, SamplingParams

TokenIds = tuple[int, ...]

# Of the tokens follow their circle: of five drafts that do, too, four are right (0.93 + 0.93 ** 2 + ..).
RIGHT = 0.93
TEXT_SEED, OTHER_SEED = 1, 2


@dataclass(frozen=True, slots=True)
class Case:
    """`share` of the target's tokens follow the circles; the sides but for `off` are what is tried."""

    name: str
    share: float
    prompt_tokens: int
    modes: tuple[Mode, ...]
    recites: bool = False  # the first prompt is every circle, twice
    shared_salt: bool = False
    draft_seed: int | None = None  # of the draft model's circles


CASES = (
    Case("repeats", RIGHT, 1014, ("lookup", "tree"), recites=True),
    Case("resembles", RIGHT, 32, ("lookup", "tree"), shared_salt=True),
    Case("agrees", RIGHT, 32, ("draft",), draft_seed=TEXT_SEED),
    Case("never", RIGHT, 32, ("draft",), draft_seed=OTHER_SEED),
    Case("noise", 0.0, 400, ("lookup", "tree")),
)


_PLAIN = SamplingParams(temperature=1.0)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one salt: each prompt is all before it, and the next of `questions`. `ends`: ids that end an
    answer; none: it goes on for as long as it may."""

    salt: str
    seed: int
    questions: tuple[TokenIds, ...]
    sampling: SamplingParams = _PLAIN
    ends: tuple[int, ...] = ()


def conversations(case: Case, count: int, num_turns: int, seed: int) -> list[Conversation]:
    chance = random.Random(f"{case.name} {seed}")
    return [
        Conversation(
            "shared" if case.shared_salt else f"own-{chance.getrandbits(64)}",
            chance.getrandbits(32),
            (_first_prompt(case, chance), *(text(case.share, 16, chance) for _ in range(num_turns - 1))),
        )
        for _ in range(count)
    ]


def _first_prompt(case: Case, chance: random.Random) -> TokenIds:
    if not case.recites:
        return text(case.share, case.prompt_tokens, chance)
    known = circles(TEXT_SEED)
    chance.shuffle(known)
    return tuple(token_id for circle in known for token_id in circle * 2)[: case.prompt_tokens]


def text(share: float, num_tokens: int, chance: random.Random) -> TokenIds:
    follows = successors(TEXT_SEED)
    ids = [chance.randrange(FIRST_ID, VOCAB_SIZE)]
    while len(ids) < num_tokens:
        goes_on = chance.random() < share
        ids.append(follows[ids[-1]] if goes_on else chance.randrange(FIRST_ID, VOCAB_SIZE))
    return tuple(ids)


def request(
    name: str, conversation: Conversation, prompt: TokenIds, answer_tokens: int, plan: Plan
) -> GenerationRequest:
    sampling = replace(
        conversation.sampling,
        seed=conversation.seed,
        max_tokens=answer_tokens,
        ignore_eos=not conversation.ends,
    )
    return GenerationRequest(
        name, prompt, sampling, plan=plan, cache_salt=conversation.salt, eos_token_ids=conversation.ends
    )
