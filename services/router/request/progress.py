"""Progress is how one request goes on its router. It alone writes this state: the others call its verbs.

PromptTurns say which of the answers to one prompt has it computed, and where the others go then.

lead -> placed anywhere -> held -> the others are placed at the holder
  ^           |             |
  |           +- left       +-- lost, with its rank: one of those that were there leads
  +-----------+

The holder's radix tree has the prompt's pages once, and each answer locks them. What an answer computes of
the prompt beside that is what the tree cannot give: a page at most, or what is behind the last checkpoint.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from services.router.cluster import HashedPrompt, Placed
from services.router.connections.output_stream import OutputStream
from services.router.request.client_request import ClientRequest
from services.router.request.stages import Stages, stages_of
from services.values.rank import RankId
from services.values.request import Admitted, FinishReason, Output
from services.wire.isthmus.v1 import generation_pb2


class PromptTurns:
    """They are one request's, on its router's loop. Answers are named by their index."""

    def __init__(self) -> None:
        self.prompt: HashedPrompt | None = None  # it has no output; set once somebody has hashed it
        self._holders: list[RankId] = []
        self._leader: int | None = None
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PromptTurns leader={self._leader} holders={[str(rank) for rank in self._holders]}>"

    def holders(self, excluded: Collection[RankId]) -> list[RankId]:
        return [rank for rank in self._holders if rank not in excluded]

    def lead(self, index: int) -> bool:
        """Return whether this answer is the one that has the prompt computed; if nobody was, it is now."""
        if self._leader is None:
            self._leader = index
        return self._leader == index

    async def changed(self, timeout_s: float) -> None:
        """Return when all are to look again, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def held(self, index: int, rank: RankId) -> None:
        if rank not in self._holders:
            self._holders.append(rank)
        self.leave(index)

    def lost(self, rank: RankId) -> None:
        """Note that the rank failed an answer: the others do not go there for the prompt any more."""
        if rank in self._holders:
            self._holders.remove(rank)

    def leave(self, index: int) -> None:
        if self._leader == index:
            self._leader = None
        self.look()

    def look(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


# From a placement that came so far the stream goes on as if nothing had failed before. The first token is the
# prefill's: a request that breaks every decode rank gets that one each time, and must not go round them all.
_PROGRESS_TOKENS = 2


@dataclass(slots=True)
class Served:
    placed: Placed
    admitted: Admitted  # this is what it had and did
    first_output: int  # placements before it had generated so many tokens
    drafted_tokens: int = 0  # so many were verified there
    accepted_draft_tokens: int = 0  # so many of them were right


@dataclass(slots=True)
class Progress:
    """This is what has become of one answer so far. The first answer's is the request's, too."""

    request: ClientRequest
    began_s: float
    span: Span
    tokenize_s: float = 0.0
    route_s: float = 0.0
    first_token_s: float | None = None
    output_ids: list[int] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    placed: Placed | None = None  # where it is now
    attempts: int = 0
    tokens_when_placed: int = 0  # it had so many when it was placed last
    # The next three are counted since a placement last got on.
    failures: int = 0
    excluded: set[RankId] = field(default_factory=set)  # incarnations: a rank that starts again may be tried
    gave_time: bool = False  # ranks that failed were let be chosen again, for there were no others
    sent_s: float = 0.0  # from `began_s` until it went to the rank that it is with
    stages: Stages | None = None  # they end with the first token
    last_tokens_at_s: float = 0.0  # when the last tokens came
    stream: OutputStream | None = None
    outgrown_s: float | None = None  # when its rank held no more, while it is to go on at a larger one
    aborted: bool = False
    finish: generation_pb2.Finish | None = None  # the client got this one
    finish_reason: FinishReason | None = None
    reasoning_tokens: int = 0
    num_calls: int = 0
    num_broken_calls: int = 0
    turns: PromptTurns | None = None  # None: there is one answer
    others: list["Progress"] = field(default_factory=list)  # the request's other answers, by index
    prompt_is_told: bool = False  # the client has what it requested of the prompt's tokens

    # -- what it tells ----------------------------------------------------------------------------

    @property
    def answers(self) -> tuple["Progress", ...]:
        return self, *self.others

    @property
    def prompt_tokens(self) -> int:
        """This is 0 until the prompt is encoded."""
        return len(self.request.prompt.ids)

    @property
    def past_answers(self) -> Mapping[str, int]:
        """The past answers of a chat are counted by what became of them, once the prompt is encoded."""
        return {} if self.request.past is None else self.request.past.outcomes

    @property
    def completion_tokens(self) -> int:
        return sum(len(answer.output_ids) for answer in self.answers)

    @property
    def admitted(self) -> Admitted | None:
        """The first placement that generated had this; the usage speaks of that one."""
        return self.served[0].admitted if self.served else None

    @property
    def first_placed(self) -> Placed | None:
        """This is where `admitted` was; where nobody has generated, where it is now."""
        return self.served[0].placed if self.served else self.placed

    def note(self, event: str, attributes: Mapping[str, str | int] | None = None) -> None:
        """Add an event to the request's trace, with the answer's index where there are several."""
        which = {} if self.turns is None else {"answer": self.request.index}
        self.span.add_event(event, {**(attributes or {}), **which})

    # -- its way to a rank ------------------------------------------------------------------------

    def encoded(self, request: ClientRequest, now: float) -> None:
        self.request = request
        self.tokenize_s = now - self.began_s

    def split(self) -> None:
        """Begin the request's other answers. An abort that came before is an abort of all of them."""
        self.turns = PromptTurns()
        self.others = [
            Progress(
                self.request.of_answer(index),
                self.began_s,
                self.span,
                tokenize_s=self.tokenize_s,
                aborted=self.aborted,
                turns=self.turns,
            )
            for index in range(1, self.request.answers)
        ]

    def routed(self, took_s: float) -> None:
        self.route_s += took_s

    def attempt(self) -> None:
        self.attempts += 1

    def place(self, placed: Placed) -> None:
        self.placed = placed
        self.tokens_when_placed = len(self.output_ids)

    def own(self, stream: OutputStream) -> None:
        """Take the stream as it is opened: whatever fails from here on, the request's end closes it."""
        self.stream = stream
        self.outgrown_s = None

    def sent(self, now: float) -> None:
        self.sent_s = now - self.began_s

    # -- what comes from the rank -----------------------------------------------------------------

    def admit(self, admitted: Admitted) -> None:
        """Note that the rank where it is placed has the prompt, and generates."""
        assert self.placed is not None
        self.served.append(Served(self.placed, admitted, self.tokens_when_placed))
        if self.turns is not None:
            self.turns.held(self.request.index, self.placed.decision.chosen.decode.id)

    def told_of_prompt(self) -> None:
        """Note that the client gets what it requested of the prompt: no later rank need report it again."""
        self.prompt_is_told = True

    def add_tokens(self, token_ids: Sequence[int], now: float) -> float | None:
        """Return the seconds since the tokens before; None where these are the first."""
        self.output_ids.extend(token_ids)
        before_s, self.last_tokens_at_s = self.last_tokens_at_s, now
        if self.first_token_s is not None:
            return now - before_s
        assert self.admitted is not None, "it comes with a token"
        self.first_token_s = now - self.began_s
        self.stages = stages_of(
            tokenize_s=self.tokenize_s,
            route_s=self.route_s,
            sent_s=self.sent_s,
            first_token_s=self.first_token_s,
            admitted=self.admitted,
        )
        self.note("first_token")
        return None

    def add_drafts(self, output: Output) -> None:
        """Count drafts where they were verified; they may come at the end alone, without a token."""
        if self.served:
            self.served[-1].drafted_tokens += output.drafted_tokens
            self.served[-1].accepted_draft_tokens += output.accepted_draft_tokens

    def read(self, reasoning_tokens: int, num_calls: int, num_broken_calls: int) -> None:
        self.reasoning_tokens = reasoning_tokens
        self.num_calls, self.num_broken_calls = num_calls, num_broken_calls

    def end(self, reason: FinishReason, finish: generation_pb2.Finish) -> None:
        self.finish_reason, self.finish = reason, finish

    # -- when a rank can do no more ---------------------------------------------------------------

    def outgrow(self, now: float) -> None:
        """Note that its rank holds no more of it; it is to go on at a larger one."""
        self.outgrown_s = now

    def withdraw(self) -> Placed | None:
        """Leave the ranks that it is with, and return them."""
        placed, self.placed = self.placed, None
        self.release()
        if placed is not None and len(self.output_ids) - self.tokens_when_placed >= _PROGRESS_TOKENS:
            self.failures, self.gave_time = 0, False  # what failed before does not count any more
            self.excluded.clear()
        return placed

    def fail(self, rank: RankId) -> None:
        self.failures += 1
        self.excluded.add(rank)
        if self.turns is not None:
            self.turns.lost(rank)

    def give_time(self) -> None:
        """Let ranks that failed it be chosen once more, for there are no others."""
        self.gave_time = True
        self.excluded.clear()

    # -- its end ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Stop the request: all its answers, also those that wait for their turn."""
        for answer in self.answers:
            answer.aborted = True
            if answer.stream is not None:
                answer.stream.abort()
        if self.turns is not None:
            self.turns.look()

    def release(self) -> None:
        """Give up what its rank still has of it; doing so twice does no more."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def leave(self) -> None:
        """End this answer, whichever way it went: it holds nothing, and the others need not wait for it."""
        self.release()
        if self.turns is not None:
            self.turns.leave(self.request.index)
