"""SGLang's log-probabilities: asked for by three parameters, told in `meta_info`.

return_logprob, top_logprobs_num: 2, logprob_start_len: 3    (-1, the default: none of the prompt)
input_token_logprobs     [[null, id 3, text], [logprob, id 4, text], ...]    its first is always null
input_top_logprobs       [null, [[logprob, id, text], ...], ...]             where others are asked for

Each event has all of them so far, as it has all the text. Long lists come with an answer's last event alone:
to write them down with each token would take the square of the answer's length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from services.router.dialects.answer import Json
from services.router.dialects.body import INT32_MAX, UINT32_MAX, Body
from services.router.dialects.openai.choice import finite
from services.wire.isthmus.v1.common_pb2 import SamplingParams, TokenLogprob, TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse

TokenText = Callable[[int], str]
_Told = tuple[float | None, int, str | None]


@dataclass(frozen=True, slots=True)
class Asked:
    """`start`: of the prompt; None: nothing of it."""

    start: int | None
    num_top: int
    with_text: bool


def read_logprobs(body: Body) -> Asked | None:
    """None: none are asked for, and then the other parameters say nothing. Raises InvalidParameter."""
    start = body.integer("logprob_start_len", -1, INT32_MAX)
    num_top = body.integer("top_logprobs_num", 0, UINT32_MAX) or 0
    if not body.flag("return_logprob"):
        return None
    return Asked(None if start in (None, -1) else start, num_top, body.flag("return_text_in_logprobs"))


def ask(asked: Asked | None, sampling: SamplingParams) -> None:
    """One token more of the prompt than is told, for its id: of a prompt's last one, too."""
    if asked is None:
        return
    sampling.logprobs = asked.num_top
    if asked.start is not None:
        sampling.prompt_logprobs, sampling.prompt_logprobs_start = asked.num_top, asked.start


@dataclass(slots=True)
class ToldTokens:
    """Of a prompt, or of an answer, so far."""

    tokens: list[_Told] = field(default_factory=list)
    top: list[list[_Told] | None] = field(default_factory=list)

    def add(self, logprobs: Sequence[TokenLogprobs], words: "Words") -> None:
        self.tokens += [words.told(token.chosen) for token in logprobs]
        self.top += [[words.told(other) for other in token.top] for token in logprobs]

    def add_unknown(self, token_id: int, words: "Words") -> None:
        self.tokens.append((None, token_id, words.text(token_id)))
        self.top.append(None)


@dataclass(frozen=True, slots=True)
class Words:
    token_text: TokenText
    asked: Asked

    def text(self, token_id: int) -> str | None:
        return self.token_text(token_id) if self.asked.with_text else None

    def told(self, token: TokenLogprob) -> _Told:
        return finite(token.logprob), token.token_id, self.text(token.token_id)

    def add_prompt(self, told: ToldTokens, response: GenerateResponse) -> None:
        """What a response tells of its prompt: nothing, but for the first ones."""
        logprobs = list(response.prompt_logprobs)
        if response.prompt_token_ids and self.asked.start is not None:
            told.add_unknown(response.prompt_token_ids[self.asked.start], self)
            logprobs = logprobs if self.asked.start == 0 else logprobs[1:]
        told.add(logprobs, self)

    def meta(self, of_prompt: ToldTokens, of_answer: ToldTokens, most: float = inf) -> Json:
        """Lists of more than so many log-probabilities are left out."""
        lists = {"input": of_prompt, "output": of_answer}
        short = {name: told for name, told in lists.items() if len(told.tokens) * self._each <= most}
        meta: Json = {f"{name}_token_logprobs": told.tokens for name, told in short.items()}
        if self.asked.num_top:
            meta |= {f"{name}_top_logprobs": told.top for name, told in short.items()}
        return meta

    @property
    def _each(self) -> int:
        return 1 + self.asked.num_top
