"""Progress is the state of one request on its router. Only its own methods write this state.

PromptTurns decide which of the answers to one prompt has it computed, and where the others go then.

lead -> placed anywhere -> held -> the others are placed at the holder
  ^           |             |
  |           +- left       +-- lost, with its rank: one of those that were there leads
  +-----------+

The holder's radix tree has the prompt's pages once, and each answer locks them. Beyond that, an answer only
computes the part of the prompt that the tree cannot give: a page at most, or the tokens after the last
checkpoint.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from services.router.cluster import HashedPrompt, Placed
from services.router.connections.output_stream import OutputStream
from services.router.request.client_request import ClientRequest
from services.router.request.stages import Stages, stages_of
from services.router.tenants import Account
from services.values.rank import RankId
from services.values.request import Admitted, FinishReason, Output
from services.wire.isthmus.v1 import generation_pb2


class PromptTurns:
    """These belong to one request, on its router's loop. Answers are named by their index."""

    def __init__(self) -> None:
        self.prompt: HashedPrompt | None = None  # It has no output, and is set once an answer has hashed it.
        self._holders: list[RankId] = []
        self._leader: int | None = None
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PromptTurns leader={self._leader} holders={[str(rank) for rank in self._holders]}>"

    def holders(self, excluded: Collection[RankId]) -> list[RankId]:
        return [rank for rank in self._holders if rank not in excluded]

    def lead(self, index: int) -> bool:
        """Return whether this answer has the prompt computed; it does from now on if no other one did."""
        if self._leader is None:
            self._leader = index
        return self._leader == index

    async def changed(self, timeout_s: float) -> None:
        """Return when all answers must check again, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def held(self, index: int, rank: RankId) -> None:
        if rank not in self._holders:
            self._holders.append(rank)
        self.leave(index)

    def lost(self, rank: RankId) -> None:
        """Note that the rank failed an answer, so that the others do not go there for the prompt."""
        if rank in self._holders:
            self._holders.remove(rank)

    def leave(self, index: int) -> None:
        if self._leader == index:
            self._leader = None
        self.look()

    def look(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


# After a placement with this many tokens the stream continues as if nothing had failed before. The first
# token comes from the prefill: a request that breaks every decode rank gets that one each time, and must not
# try all ranks again.
_PROGRESS_TOKENS = 2


@dataclass(slots=True)
class Served:
    placed: Placed
    admitted: Admitted  # This is the rank's report.
    first_output: int  # Earlier placements had generated so many tokens.
    drafted_tokens: int = 0  # This many were verified there.
    accepted_draft_tokens: int = 0  # This many of them were right.


@dataclass(slots=True)
class Progress:
    """This is the state of one answer. The first answer's is also the request's."""

    request: ClientRequest
    began_s: float
    span: Span
    tokenize_s: float = 0.0
    route_s: float = 0.0
    first_token_s: float | None = None
    output_ids: list[int] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    placed: Placed | None = None  # It is there now.
    was_placed: bool = False
    attempts: int = 0
    tokens_when_placed: int = 0  # It had this many when it was last placed.
    # The next three are counted since a placement last made progress.
    failures: int = 0
    excluded: set[RankId] = field(default_factory=set)  # A restarted rank is another one.
    gave_time: bool = False  # Failed ranks were allowed again, as there were no others.
    sent_s: float = 0.0  # This is the time from `began_s` until it was sent to its rank.
    stages: Stages | None = None  # These end with the first token.
    last_tokens_at_s: float = 0.0  # The last tokens came at this time.
    stream: OutputStream | None = None
    outgrown_s: float | None = None  # Its rank was full at this time, and it waits for a larger one.
    aborted: bool = False
    finish: generation_pb2.Finish | None = None  # The client got this.
    finish_reason: FinishReason | None = None
    reasoning_tokens: int = 0
    num_calls: int = 0
    num_broken_calls: int = 0
    turns: PromptTurns | None = None  # This is None where there is one answer.
    others: list["Progress"] = field(default_factory=list)  # These are the request's other answers, by index.
    prompt_is_told: bool = False  # The client has the prompt's log-probabilities.
    taken_tokens: int = 0  # So many of its prompt were taken from the tenant's rate.
    account: Account | None = None  # It is the tenant's, where tenants have limits.

    # -- what it tells ----------------------------------------------------------------------------

    @property
    def answers(self) -> tuple["Progress", ...]:
        return self, *self.others

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt.ids)

    @property
    def past_answers(self) -> Mapping[str, int]:
        """Return the number of a chat's past answers by outcome, once the prompt is encoded."""
        return {} if self.request.past is None else self.request.past.outcomes

    @property
    def completion_tokens(self) -> int:
        return sum(len(answer.output_ids) for answer in self.answers)

    @property
    def served_tokens(self) -> int:
        """Return how many tokens ranks have computed and generated for all answers."""
        computed = (each.admitted.computed_tokens for answer in self.answers for each in answer.served)
        return sum(computed) + self.completion_tokens

    @property
    def admitted(self) -> Admitted | None:
        """Return the report of the first placement that generated, which the usage is about."""
        return self.served[0].admitted if self.served else None

    @property
    def first_placed(self) -> Placed | None:
        """Return the placement of `admitted` or, before any token, the current one."""
        return self.served[0].placed if self.served else self.placed

    def note(self, event: str, attributes: Mapping[str, str | int] | None = None) -> None:
        which = {} if self.turns is None else {"answer": self.request.index}
        self.span.add_event(event, {**(attributes or {}), **which})

    # -- its way to a rank ------------------------------------------------------------------------

    def encoded(self, request: ClientRequest, now: float) -> None:
        self.request = request
        self.tokenize_s = now - self.began_s

    def split(self) -> None:
        """Begin the request's other answers. An earlier abort aborts all of them."""
        self.turns = PromptTurns()
        self.others = [
            Progress(
                self.request.of_answer(index),
                self.began_s,
                self.span,
                tokenize_s=self.tokenize_s,
                aborted=self.aborted,
                turns=self.turns,
                account=self.account,
            )
            for index in range(1, self.request.answers)
        ]

    def routed(self, took_s: float) -> None:
        self.route_s += took_s

    def attempt(self) -> None:
        self.attempts += 1

    def place(self, placed: Placed) -> None:
        self.placed, self.was_placed = placed, True
        self.tokens_when_placed = len(self.output_ids)

    def own(self, stream: OutputStream) -> None:
        """Own the stream once it is opened: whatever fails from here on, the request's end closes it."""
        self.stream = stream
        self.outgrown_s = None

    def sent(self, now: float) -> None:
        self.sent_s = now - self.began_s

    # -- what comes from the rank -----------------------------------------------------------------

    def admit(self, admitted: Admitted) -> None:
        assert self.placed is not None
        self.served.append(Served(self.placed, admitted, self.tokens_when_placed))
        if self.turns is not None:
            self.turns.held(self.request.index, self.placed.decision.chosen.decode.id)

    def told_of_prompt(self) -> None:
        """Note that the client has the prompt's log-probabilities: no later rank needs to report them."""
        self.prompt_is_told = True

    def add_tokens(self, token_ids: Sequence[int], now: float) -> float | None:
        """Return the seconds since the last tokens, or None where these are the first."""
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
        self.outgrown_s = now

    def withdraw(self) -> Placed | None:
        placed, self.placed = self.placed, None
        self.release()
        if placed is not None and len(self.output_ids) - self.tokens_when_placed >= _PROGRESS_TOKENS:
            self.failures, self.gave_time = 0, False  # Earlier failures do not count any more.
            self.excluded.clear()
        return placed

    def fail(self, rank: RankId) -> None:
        self.failures += 1
        self.excluded.add(rank)
        if self.turns is not None:
            self.turns.lost(rank)

    def give_time(self) -> None:
        self.gave_time = True
        self.excluded.clear()

    # -- its end ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Stop all answers of the request, also those that wait for their turn."""
        for answer in self.answers:
            answer.aborted = True
            if answer.stream is not None:
                answer.stream.abort()
        if self.turns is not None:
            self.turns.look()

    def release(self) -> None:
        """Close the stream from its rank. A second call does nothing."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def leave(self) -> None:
        """End this answer, whatever its outcome: it holds nothing, and the others do not wait for it."""
        self.release()
        if self.turns is not None:
            self.turns.leave(self.request.index)


def held_tokens(running: Iterable[Progress]) -> Counter[str]:
    """Return how many tokens the requests of each tenant that run on ranks have, whose KV these hold."""
    held = Counter[str]()
    for progress in running:
        for answer in progress.answers:
            if answer.placed is not None:
                held[progress.request.turn_of] += answer.prompt_tokens + len(answer.output_ids)
    return held
