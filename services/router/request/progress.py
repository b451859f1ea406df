"""One request on the router: what was asked, and what has become of its answers so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from services.router.cluster import Placed
from services.router.links.output_stream import OutputStream
from services.router.request.answers.prompt_turns import PromptTurns
from services.router.request.telemetry.stages import Stages
from services.router.request.tools import ChatTools
from services.values.rank import RankId
from services.values.request import Admitted, FinishReason, Output, SamplingParams
from services.wire.isthmus.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Checked:
    """A client's request after the door."""

    request_id: str
    sampling: SamplingParams
    conversation_id: str
    tenant: str
    priority: int
    runs_few: bool = False  # beside a crowd of other tenants', as it was when this request came
    operation: str = "text_completion"  # or chat
    tools: ChatTools = field(default_factory=ChatTools)
    answers: int = 1  # that are generated, and
    answered: int = 1  # of them, those that the client gets: the best
    index: int = 0  # of this answer
    tells_logprobs: bool = True  # False: they are asked for to rank the answers

    @property
    def answer_name(self) -> str:
        """What ranks and log lines call this answer."""
        return f"{self.request_id}#{self.index}" if self.index else self.request_id

    @property
    def answer_key(self) -> str:
        """Names it among all that are in flight: tenants choose their ids apart; none of them has a NUL."""
        return f"{self.tenant}\0{self.request_id}\0{self.index}"

    @property
    def constraint(self) -> str:
        """Its kind; empty: none."""
        return "" if self.sampling.constraint is None else self.sampling.constraint.kind.value

    @property
    def memory_key(self) -> str:
        """Names the conversation, for tenants may choose the same ids; empty where none was named."""
        return f"{self.tenant}\0{self.conversation_id}" if self.conversation_id else ""


@dataclass(slots=True)
class Served:
    """A placement that generated."""

    placed: Placed
    admitted: Admitted  # what it had and did
    first_output: int  # tokens that placements before it had generated
    drafted_tokens: int = 0  # verified there, and
    accepted_draft_tokens: int = 0  # of them, those that were right

    def note_drafts(self, output: Output) -> None:
        self.drafted_tokens += output.drafted_tokens
        self.accepted_draft_tokens += output.accepted_draft_tokens


@dataclass(slots=True)
class Progress:
    """What has become of one answer so far. The first one's is the request's, too."""

    request_id: str
    began_s: float
    span: Span
    tokenize_s: float = 0.0
    route_s: float = 0.0
    first_token_s: float | None = None
    output_ids: list[int] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    placed: Placed | None = None  # where it is now
    attempts: int = 0
    tokens_when_placed: int = 0  # that it had when it was placed last
    # Since a placement last got on:
    failures: int = 0
    excluded: set[RankId] = field(default_factory=set)  # lives of ranks: who starts again may be tried
    gave_time: bool = False  # to ranks that failed, when there were no others
    sent_s: float = 0.0  # to the rank it is with, from `began_s`
    stages: Stages | None = None  # up to the first token
    last_tokens_at_s: float = 0.0  # when the last tokens came
    stream: OutputStream | None = None
    outgrown_s: float | None = None  # when its rank held no more, while it is to go on at a larger one
    aborted: bool = False
    operation: str = "text_completion"  # or chat: what was asked for
    constraint: str = ""  # its kind
    tenant: str = ""
    conversation_id: str = ""
    prompt_tokens: int = 0  # known once it is encoded
    finish: generation_pb2.Finish | None = None  # as the client got it
    finish_reason: FinishReason | None = None
    reasoning_tokens: int = 0
    num_calls: int = 0
    num_broken_calls: int = 0
    past_answers: Mapping[str, int] = field(default_factory=dict)  # of a chat: how many of them were what
    index: int = 0  # of the answer
    turns: PromptTurns | None = None  # where there are several
    others: list["Progress"] = field(default_factory=list)  # of the request's other answers, by index
    prompt_is_told: bool = False  # what was asked of its tokens

    @property
    def answers(self) -> tuple["Progress", ...]:
        return self, *self.others

    @property
    def completion_tokens(self) -> int:
        """Of all answers."""
        return sum(len(answer.output_ids) for answer in self.answers)

    @property
    def admitted(self) -> Admitted | None:
        """Of the first placement that generated: what the usage speaks of."""
        return self.served[0].admitted if self.served else None

    @property
    def first_placed(self) -> Placed | None:
        """Where `admitted` was; where nobody has generated, where it is now."""
        return self.served[0].placed if self.served else self.placed

    def another(self, index: int) -> "Progress":
        """Of another answer to the same prompt. An abort that came before there was any is of all of them."""
        return Progress(
            self.request_id,
            self.began_s,
            self.span,
            tokenize_s=self.tokenize_s,
            aborted=self.aborted,
            operation=self.operation,
            constraint=self.constraint,
            index=index,
            turns=self.turns,
        )

    def note(self, event: str, attributes: Mapping[str, str | int] | None = None) -> None:
        """In the request's trace, with the answer's index where there are several."""
        which = {} if self.turns is None else {"answer": self.index}
        self.span.add_event(event, {**(attributes or {}), **which})

    def begin_anew(self) -> None:
        """What failed before does not count any more."""
        self.failures, self.gave_time = 0, False
        self.excluded.clear()
