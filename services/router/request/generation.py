"""The Generator serves client requests, from the prompt to the last response.

    checked -> encoded -> tokens, from as many ranks as needed (failover.py) -> text -> client

A stream that moves continues with identical tokens: randomness is a function of (seed, position), and the new
rank gets every token so far. Where an engine's penalties would ignore those tokens, failover.py ends the
stream.
"""

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from opentelemetry.trace import Span

from services.grammar.grammars import Grammars
from services.observe import traces
from services.router.cluster import Cluster, Explained
from services.router.parsing.parser_choice import ParserChoice
from services.router.placement.candidates import allowed_wait_s
from services.router.request import story
from services.router.request.answers import answers_to, counts_of
from services.router.request.client_request import ClientRequest
from services.router.request.failover import AnswerContext
from services.router.request.parsers import Parsers
from services.router.request.progress import Progress
from services.router.request.router_metrics import RouterMetrics
from services.router.request.story import attributes_of, log_request
from services.router.tenants import OTHERS, Account, Tenant, Tenants, entered
from services.router.text.answer_ends import banned_ids
from services.router.text.chat_memory import AnswerMemory, ConversationMemory
from services.router.text.chat_turns import ToolSpellings
from services.router.text.prompt import PastAnswers, PromptEncoder
from services.router.text.tokenizer import Tokenizer
from services.values.adapter import Adapter, model_and_adapter
from services.values.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InvalidRequest,
    IsthmusError,
    NotFound,
)
from services.values.rank import Role
from services.values.request import MAX_ID_CHARS, MAX_TIMEOUT_S, is_id, reusable_of, scored_of
from services.wire import convert_request
from services.wire.generation_messages import PackedIds
from services.wire.isthmus.v1 import generation_pb2

_REMEMBERED_CONVERSATIONS = 10_000
_REMEMBERED_TOKEN_IDS = 16 << 20  # 64 MiB
_REMEMBERED_ANSWERS_BYTES = 256 << 20
_REMEMBERED_TOOLS_BYTES = 16 << 20
_LAST_WORDS_S = 1.0
_MOST_CONTEXTS = 16  # A prompt that is only counted may be this many contexts long.
_UNLIMITED = Tenant(OTHERS)
_DEADLINE_LEAD_S = 0.1  # gRPC, or the client, may end a call by its deadline this much before our clock does.


@dataclass(frozen=True, slots=True)
class Explanation:
    """`constraint` is the answer's kind of constraint. `past_answers` counts past turns by outcome."""

    prompt_tokens: int
    explained: Explained
    constraint: str
    past_answers: Mapping[str, int]


class Generator:
    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer,
        cluster: Cluster,
        metrics: RouterMetrics,
        *,
        max_attempts: int,
        max_wait_s: float,
        request_timeout_s: float,
        max_priority: int = 0,
        heeds_deadlines: bool = False,
        grammars: Grammars | None = None,
        parsers: ParserChoice | None = None,
        keeps_strict: bool = True,
        keep_thinking: bool = False,
        tenants: Tenants | None = None,
        served_names: Callable[[], Sequence[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._cluster = cluster
        self._metrics = metrics
        self._grammars = grammars or Grammars(None, 0)
        self._parsers = Parsers(tokenizer, parsers or ParserChoice(), keeps_strict)
        self._tool_constraints = self._parsers.tool_constraints(self._grammars)
        self._max_wait_s = max_wait_s
        self._request_timeout_s = request_timeout_s
        self._max_priority = max_priority
        self._heeds_deadlines = heeds_deadlines
        self._keep_thinking = keep_thinking
        self._limited = tenants
        self._served_names = served_names or (lambda: [model_name])
        self._clock = clock
        self._context = AnswerContext(
            cluster,
            tokenizer,
            ConversationMemory(_REMEMBERED_CONVERSATIONS, _REMEMBERED_TOKEN_IDS),
            metrics,
            self._parsers,
            max_attempts,
            self._allowed_wait_s,
            clock,
        )
        self._running: dict[tuple[str, str], Progress] = {}  # The keys are tenants and request ids.
        self._tenants = Counter[str]()  # This counts the running requests of each tenant.
        self._listeners: list[Callable[[Progress, str], None]] = []
        self._answers = AnswerMemory(_REMEMBERED_ANSWERS_BYTES)
        self._spellings = ToolSpellings(_REMEMBERED_TOOLS_BYTES)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Collection[Progress]:
        """Return the running requests, the oldest first. The collection must not be kept over an await."""
        return self._running.values()

    def listen(self, ended: Callable[[Progress, str], None]) -> Callable[[], None]:
        """Call `ended` with each request that ends and its outcome, until the returned function is called."""
        self._listeners.append(ended)
        return partial(self._listeners.remove, ended)

    @property
    def remembered_answer_bytes(self) -> int:
        return self._answers.size_bytes

    def is_running(self, tenant: str, request_id: str) -> bool:
        return (tenant, request_id) in self._running

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Stop the tenant's request with this id, or with None anyone's. Return False for none."""
        if tenant is None:
            found = [progress for (_, known), progress in self._running.items() if known == request_id]
        else:
            own = self._running.get((tenant, request_id))
            found = [] if own is None else [own]
        for progress in found:
            progress.abort()
        return bool(found)

    async def explain(self, request: generation_pb2.GenerateRequest) -> Explanation:
        """Return where the request would go now without a deadline; nothing is sent or remembered.

        Raises Unavailable where no decode rank is registered, OverLimit where the tenant makes too many such
        calls, and the errors of a refused request as `generate` does.
        """
        self._look(request.tenant)
        past = self._past(request)
        checked = await self._check(request)
        checked = await self._encoded(checked, await self._encoder().encode(request, past), past)
        ids, sampling = checked.prompt.ids, checked.sampling
        prompt = await self._cluster.hash(ids, checked.scope, sampling.max_tokens)
        reusable = reusable_of(sampling, len(ids))
        prompt = replace(prompt, reusable_tokens=reusable, answers=checked.answers, adapter=checked.adapter)
        max_wait_s = self._allowed_wait_s(checked, self._request_timeout_s)
        explained = self._cluster.explain(prompt, checked.memory_key, max_wait_s)
        constraint = "" if sampling.constraint is None else sampling.constraint.kind.value
        return Explanation(len(ids), explained, constraint, past.outcomes if past is not None else {})

    async def tokenize(self, request: generation_pb2.GenerateRequest) -> generation_pb2.TokenizeResponse:
        """Return the prompt's ids, even if they are too many, and the size of the context. Raises as
        `explain`, and ContextExceeded where the prompt is many times too long."""
        self._look(request.tenant)
        await self._check(request)
        context_tokens = self._cluster.max_context_tokens()
        encoder = self._encoder(_MOST_CONTEXTS * context_tokens)
        prompt = await encoder.encode(request, self._past(request))
        return generation_pb2.TokenizeResponse(token_ids=prompt.ids, max_context_tokens=context_tokens)

    async def detokenize(self, model: str, token_ids: Sequence[int], tenant: str) -> str:
        """Return the tokens' text, with special tokens. Raises InvalidRequest, NotFound, Unavailable and
        OverLimit."""
        self._look(tenant)
        self._adapter_of(model)
        if not token_ids or max(token_ids) >= self._tokenizer.vocab_size:
            raise InvalidRequest(
                f"token_ids must be at least one id below the vocabulary's size {self._tokenizer.vocab_size}"
            )
        return await asyncio.to_thread(self._tokenizer.text_of, token_ids)

    def _look(self, tenant: str) -> None:
        if self._limited is not None:
            self._limited.account(tenant).look()

    def time_limit_s(self, timeout_s: float | None) -> float:
        """Return the seconds in which a call with this timeout, or none, is over with all responses."""
        return self._timeout_s(timeout_s) + _LAST_WORDS_S

    def _timeout_s(self, timeout_s: float | None) -> float:
        return min(MAX_TIMEOUT_S, self._request_timeout_s if timeout_s is None else timeout_s)

    async def generate(
        self,
        request: generation_pb2.GenerateRequest,
        timeout_s: float | None = None,
        traceparent: str = "",
        *,
        ids: PackedIds | None = None,
        report_prompt: Callable[[PackedIds], None] | None = None,
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield responses as they come. Each answer's last one has `finish`; with the last of all nothing is
        held any more.

        Args:
            timeout_s: the client's; None means --request-timeout-s.
            traceparent: the client's, or "".
            ids: those of `request.token_ids`, if they are not in it.
            report_prompt: receives the prompt before the first response.

        Raises:
            InvalidRequest, NotFound, AlreadyRunning: the request is refused.
            OverLimit: its tenant has reached one of its limits.
            NoCapacity: no rank can hold it, or it would wait too long for its turn.
            Unavailable: no rank can take it.
            DeadlineExceeded: the timeout has passed. It is not raised while the caller sends a response, so
                that the caller has to limit that by `time_limit_s`.
        """
        heeds_deadline = self._heeds_deadlines and timeout_s is not None
        timeout_s = self._timeout_s(timeout_s)
        deadline = self._clock() + timeout_s
        self._metrics.received()
        with traces.span("router.generate", traceparent) as span:
            if span.is_recording():
                span.set_attributes(story.request_attributes(request, self._model_name))
            with entered(self._limited, request.tenant, self._metrics.rejected) as account:
                checked = await self._admit(request, timeout_s, deadline)
                checked = replace(checked, heeds_deadline=heeds_deadline)
                with self._track(checked, span, account) as progress:
                    past = self._past(request)
                    encoder = self._encoder()
                    prompt = await encoder.encode(request, past) if ids is None else encoder.check(ids)
                    if account is not None:
                        account.take_prompt(len(prompt.ids))
                        progress.taken_tokens = len(prompt.ids)
                    checked = await self._encoded(checked, prompt, past)
                    scored_of(checked.sampling, len(prompt.ids))
                    progress.encoded(checked, self._clock())
                    self._metrics.past_answers(progress.past_answers)
                    answers = answers_to(self._context, progress)
                    async with aclosing(answers):
                        response = await answers.next_response()
                        if report_prompt is not None:
                            report_prompt(prompt)
                        unfinished = checked.answered
                        while unfinished := unfinished - response.HasField("finish"):
                            yield response
                            response = await answers.next_response()
        # A client that leaves after its last response has not cancelled anything.
        yield response

    def check_together(self, tenant: str, requests: int) -> None:
        """Raise InvalidRequest where the tenant can never run so many requests at once."""
        if self._limited is not None:
            self._limited.account(tenant).check_together(requests)

    def rejected(self, error: IsthmusError) -> None:
        """Count a request that a front end could not read."""
        self._metrics.received()
        self._metrics.rejected(error)

    # -- the model and the ranks ------------------------------------------------------------------

    def list_models(self) -> generation_pb2.ListModelsResponse:
        """Return the model with the number of usable ranks, then its adapters; its context does not change
        while ranks come and go."""
        adapters = [each for _, each in sorted(self._cluster.adapters().items())]
        return generation_pb2.ListModelsResponse(models=map(self._model, (None, *adapters)))

    def _model(self, adapter: Adapter | None) -> generation_pb2.Model:
        return generation_pb2.Model(
            id=self._model_name if adapter is None else f"{self._model_name}:{adapter.name}",
            max_context_tokens=self.context_tokens() or 0,
            prefill_ranks=self._num_up(Role.PREFILL, adapter),
            decode_ranks=self._num_up(Role.DECODE, adapter),
            base="" if adapter is None else self._model_name,
        )

    def _num_up(self, role: Role, adapter: Adapter | None) -> int:
        ranks = self._cluster.ranks(role)
        with_it = [each for each in ranks if adapter is None or adapter in each.registration.adapters]
        return sum(map(self._cluster.is_up, with_it))

    def context_tokens(self) -> int | None:
        return self._cluster.max_context_tokens() if self._cluster.ranks(Role.DECODE) else None

    def check_usable(self, model: str = "") -> None:
        """Raise Unavailable, with the reason, while no rank could take any request, and NotFound while none
        has the adapter of MODEL:NAME."""
        self._cluster.check_usable(self._adapter_of(model))

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that is a part of a character, which its text cannot show, or None
        where they are not known."""
        return self._tokenizer.token_bytes(token_id)

    # -- the door ---------------------------------------------------------------------------------

    async def _admit(
        self, request: generation_pb2.GenerateRequest, timeout_s: float, deadline: float
    ) -> ClientRequest:
        try:
            checked = await self._check(request, deadline)
            if self.is_running(checked.tenant, checked.request_id):
                raise AlreadyRunning(f"request_id {checked.request_id!r} is running")
            self._cluster.check_room(self._allowed_wait_s(checked, timeout_s), checked.answers)
        except IsthmusError as error:
            if self._limited and not isinstance(error, InvalidRequest | NotFound | AlreadyRunning):
                self._limited.account(request.tenant).give_back(0, 1)
            self._metrics.rejected(error)
            raise
        return checked

    async def _check(
        self, request: generation_pb2.GenerateRequest, deadline: float = math.inf
    ) -> ClientRequest:
        checked = self._read(request, deadline)
        if (constraint := checked.sampling.constraint) is not None:
            await self._grammars.beside(self._grammars.check, constraint)
        if checked.sampling.bad_words:
            checked = await asyncio.to_thread(self._banned, checked)
        checked.sampling.check_vocabulary(self._tokenizer.vocab_size)
        return checked

    def _banned(self, checked: ClientRequest) -> ClientRequest:
        sampling = checked.sampling
        bad = (*sampling.bad_token_ids, *banned_ids(self._tokenizer, sampling.bad_words))
        return replace(checked, sampling=replace(sampling, bad_words=(), bad_token_ids=bad))

    def _read(self, request: generation_pb2.GenerateRequest, deadline: float) -> ClientRequest:
        adapter = self._adapter_of(request.model)
        for name in ("request_id", "conversation_id", "tenant"):
            if not is_id(getattr(request, name)):
                raise InvalidRequest(f"{name} must be at most {MAX_ID_CHARS} printable characters")
        account = None if self._limited is None else self._limited.account(request.tenant)
        tenant = _UNLIMITED if account is None else account.tenant
        self._check_priority(request.priority, tenant.max_priority)
        share = None if account is None else account.share_of(request.tenant, request.conversation_id)
        answers, answered = counts_of(request)
        if request.WhichOneof("prompt") == "chat":
            self._spellings.restore(request.tenant, request.chat)
        tools = self._parsers.read_tools(request)
        sampling = request.sampling
        constraint = sampling.constraint.WhichOneof("kind") or ""
        tells_logprobs = sampling.HasField("logprobs") or answers == answered
        instead = {} if sampling.HasField("seed") else {"seed": secrets.randbits(64)}
        if not tells_logprobs:
            instead["logprobs"] = 0
        return ClientRequest(
            request_id=request.request_id or secrets.token_hex(8),
            model=self._model_name,
            sampling=convert_request.sampling_from_proto(sampling, **instead),
            conversation_id=request.conversation_id,
            tenant=request.tenant,
            cache_salt=tenant.cache_salt,
            share=share,
            priority=request.priority,
            runs_few=self._runs_few(request.tenant if share is None else share.tenant),
            operation=story.operation_of(request),
            constraint=constraint,
            tools=tools,
            answers=answers,
            answered=answered,
            tells_logprobs=tells_logprobs,
            deadline=deadline,
            adapter=adapter,
        )

    def _check_priority(self, priority: int, of_tenant: int | None) -> None:
        most, why = self._max_priority, "on this server (--max-priority)"
        if of_tenant is not None:
            most, why = of_tenant, "for this tenant (--tenants)"
        if priority > most:
            raise InvalidRequest(f"priority must be at most {most} {why}, got {priority}")

    async def _encoded(
        self, checked: ClientRequest, prompt: PackedIds, past: PastAnswers | None
    ) -> ClientRequest:
        sampling = await self._tool_constraints.put(checked.tools, checked.sampling, prompt.ids)
        return checked.encoded(prompt, past, sampling)

    def _adapter_of(self, model: str) -> Adapter | None:
        """Return the adapter of MODEL:NAME, or None for the model alone. Raises NotFound, or Unavailable
        while there is no rank that could have it."""
        name = model_and_adapter(model, self._model_name)
        if name == "":
            return None
        if name is None:
            names = self._served_names()
            served = f"{', '.join(map(repr, names))} {'is' if len(names) == 1 else 'are'}"
            raise NotFound(f"model {model!r} is not served here; {served}")
        adapter = self._cluster.adapters().get(name)
        if adapter is None:
            self._cluster.check_usable()
            raise NotFound(f"adapter {name!r} of model {self._model_name!r} is loaded on no decode rank")
        return adapter

    def _allowed_wait_s(self, request: ClientRequest, remaining_s: float) -> float:
        """Return how long the request may wait. One with a raised priority has no limit, as it does not wait
        behind the others. Nor has one of a tenant that runs few requests beside many of others: tenants take
        turns on a rank."""
        passes = request.priority > 0 or request.runs_few
        return math.inf if passes else allowed_wait_s(self._max_wait_s, remaining_s)

    def _runs_few(self, tenant: str) -> bool:
        """Return whether the tenant runs at most half of its share here, by its weight, including one request
        that is not counted yet."""
        accounts: Mapping[str, Account] = {} if self._limited is None else self._limited.accounts
        weights = {
            name: accounts[name].tenant.weight if name in accounts else 1.0
            for name in self._tenants.keys() | {tenant}
        }
        wanted = 2 * sum(weights.values()) * (self._tenants[tenant] + 1)
        runs_few = wanted <= weights[tenant] * len(self._running)
        # Where ranks do not let tenants take turns, it would wait like any other.
        return len(weights) > 1 and runs_few and self._cluster.takes_turns

    def _encoder(self, max_tokens: int | None = None) -> PromptEncoder:
        return PromptEncoder(
            self._tokenizer,
            max_tokens or self._cluster.max_context_tokens(),
            self._tokenizer.vocab_size,
            keep_thinking=self._keep_thinking,
            call_text=self._parsers.call_text,
        )

    def _past(self, request: generation_pb2.GenerateRequest) -> PastAnswers | None:
        if request.WhichOneof("prompt") != "chat":
            return None
        return PastAnswers(self._answers, request.tenant, self._model_name, request.chat)

    @contextmanager
    def _track(
        self, checked: ClientRequest, span: Span, account: Account | None = None
    ) -> Iterator[Progress]:
        progress = Progress(checked, self._clock(), span, account=account)
        self._running[checked.tenant, checked.request_id] = progress
        self._tenants[checked.turn_of] += 1
        outcome = "finished"
        try:
            yield progress
        except InvalidRequest:
            outcome = InvalidRequest.__name__  # Its subclasses count as one.
            raise
        except IsthmusError as error:
            outcome = type(error).__name__
            raise
        except Exception:
            outcome = "Internal"  # This is a bug of ours.
            raise
        except BaseException:  # The call was cancelled, or its generator closed.
            is_over = self._clock() >= checked.deadline - _DEADLINE_LEAD_S
            outcome = DeadlineExceeded.__name__ if is_over else "cancelled"
            raise
        finally:
            del self._running[checked.tenant, checked.request_id]
            self._left(checked.turn_of)
            progress.release()
            if account is not None:
                account.served(checked.tenant, checked.conversation_id, progress.served_tokens)
                if not progress.was_placed:
                    is_invalid = outcome == InvalidRequest.__name__
                    account.give_back(progress.taken_tokens, 0 if is_invalid else 1)
            self._cluster.ended(checked.answer_key)
            self._report_end(progress, outcome)

    def _left(self, tenant: str) -> None:
        self._tenants[tenant] -= 1
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    def _report_end(self, progress: Progress, outcome: str) -> None:
        self._metrics.ended(progress, outcome, self._clock() - progress.began_s)
        if progress.span.is_recording():
            answered = story.answer_attributes(progress, self._model_name)
            progress.span.set_attributes(attributes_of(progress) | answered)
        log_request(progress, outcome)
        for ended in self._listeners:
            ended(progress, outcome)
