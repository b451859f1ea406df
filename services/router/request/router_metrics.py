"""RouterMetrics report a router's requests to Prometheus; index/index_metrics.py reports the index."""

from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.index.read.mirror import Mirror
from services.observe import traces
from services.observe.prometheus import Children, RepeatedHistogram
from services.router.api_keys import FRONTS, REASONS
from services.router.cluster import Cluster, Placed
from services.router.request.progress import Progress
from services.router.request.stages import STAGES
from services.router.request.story import GenAiMetrics
from services.router.text.prompt import OUTCOMES
from services.values.errors import Aborted, AlreadyRunning, Forbidden, InvalidRequest, IsthmusError, NotFound
from services.values.rank import RankId, Role
from services.values.request import Admitted, ConstraintKind, FinishReason, Pulled

# The buckets go up to the longest wait (--max-wait-s), and those of whole requests to their time limit
# (--request-timeout-s).
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_REQUEST_SECONDS = (*_SECONDS, 1200.0, 3600.0)
_STAGE_SECONDS = (0.0005, 0.001, 0.0025, *_SECONDS)
# A long context has a hundred times as many tokens as a short question.
_LENGTHS = (1, *(2**power for power in range(3, 21)))
_ITL_SECONDS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1.0, 5.0)
# These errors are the client's mistakes.
MISTAKES = tuple(error.__name__ for error in (InvalidRequest, NotFound, AlreadyRunning, Forbidden))
PULL_RESULTS = ("pulled", "not_needed", "gone", "evicted", "busy", "late", "corrupt", "failed")
_RANK = ("role", "worker", "rank")
# Held blocks need no transfer to a decode rank under plan remote. Resumable blocks need not be computed again
# by the rank that computes. The two differ where a model has per-request state.
_HELD, _RESUMABLE = "held", "resumable"
_RANK_AND_KIND = (*_RANK, "kind")


class RouterMetrics:
    def __init__(self, registry: CollectorRegistry, model: str = "") -> None:
        self.registry = registry
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._gen_ai = GenAiMetrics(registry, model)
        self._ttft = histogram(
            "isthmus_ttft_seconds", "Request received until its first token.", buckets=_SECONDS
        )
        self._stages = histogram(
            "isthmus_ttft_stage_seconds",
            "Request received until its first token, by stage; the stages of a request add up.",
            ["stage"],
            buckets=_STAGE_SECONDS,
        )
        self._by_stage = [self._stages.labels(stage) for stage in STAGES]
        self._itl = RepeatedHistogram(
            "isthmus_itl_seconds",
            "Between two tokens of a stream, as the router sees them.",
            _ITL_SECONDS,
            registry,
        )
        self._duration = histogram(
            "isthmus_request_seconds", "Request received until its end.", buckets=_REQUEST_SECONDS
        )
        self._abandoned = histogram(
            "isthmus_abandoned_seconds",
            "Request received until its client gave it up, of those without a token.",
            buckets=_SECONDS,
        )
        self._prompt_length = histogram(
            "isthmus_request_prompt_tokens",
            "Prompt tokens of a request, of those that a rank admitted.",
            buckets=_LENGTHS,
        )
        self._output_length = histogram(
            "isthmus_request_output_tokens",
            "Tokens generated for a request, of those that a rank admitted.",
            buckets=_LENGTHS,
        )
        self._received = counter(
            "isthmus_requests_received",
            "Requests, counted when they come.",
        )
        self._requests = Children(
            counter(
                "isthmus_requests",
                "Requests by how they ended: finished, cancelled, or the error's name (Internal: a bug).",
                ["outcome"],
            )
        )
        self._rejections = counter(
            "isthmus_rejections",
            "Requests that ended before any rank admitted them, by the error's name.",
            ["reason"],
        )
        for mistake in MISTAKES:  # Service levels exclude these, from the first one on.
            self._rejections.labels(mistake)
        self._unauthenticated = counter(
            "isthmus_unauthenticated",
            "Requests refused without a valid API key, by front end and by whether a key was sent.",
            ["front", "reason"],
        )
        for front in FRONTS:
            for reason in REASONS.values():
                self._unauthenticated.labels(front, reason)
        self._placements = Children(
            counter("isthmus_placements", "Decisions by plan and reason.", ["plan", "reason"])
        )
        self._answers = counter(
            "isthmus_answers",
            "Answers that a rank began; a request may have several.",
        )
        self._prompt = counter(
            "isthmus_prompt_tokens",
            "Prompt tokens of admitted requests; for each further answer those that a rank computed again.",
        )
        self._reused = counter(
            "isthmus_reused_tokens", "Prompt tokens of admitted requests that no rank had to compute."
        )
        self._computed = counter(
            "isthmus_computed_tokens",
            "Prompt tokens of admitted requests that a rank computed, at their first placement; "
            "isthmus_rank_computed_tokens counts all.",
        )
        self._drift = counter(
            "isthmus_drift_tokens", "Tokens of past turns that did not come back as they were generated."
        )
        self._past_answers = counter(
            "isthmus_past_answers",
            "Past answers in chats: given (with their ids), found, changed (found, but the template shows "
            "them differently), unknown.",
            ["outcome"],
        )
        for outcome in OUTCOMES:
            self._past_answers.labels(outcome)
        self.remembered_answers = Gauge(
            "isthmus_remembered_answer_bytes",
            "Bytes of remembered past answers.",
            registry=registry,
        )
        self._completion = counter("isthmus_completion_tokens", "Generated tokens.")
        self._reasoning = counter(
            "isthmus_reasoning_tokens",
            "Generated tokens of thinking, of answers that have ended.",
        )
        self._calls = counter(
            "isthmus_tool_calls",
            "Calls of tools in answers: read, or broken, which the client got as text.",
            ["outcome"],
        )
        self._read_calls, self._broken_calls = map(self._calls.labels, ("read", "broken"))
        self._constrained = counter(
            "isthmus_constrained_requests",
            "Requests that have ended and were under a constraint, by its kind.",
            ["kind"],
        )
        for constraint in ConstraintKind:
            self._constrained.labels(constraint.value)
        self._moved = counter(
            "isthmus_kv_moved_bytes", "KV bytes that were moved, for all placements of a request."
        )
        self._saved = counter(
            "isthmus_kv_saved_bytes",
            "KV bytes that did not have to be moved, for all placements of a request.",
        )
        self._pulled = counter(
            "isthmus_pulled_tokens",
            "Prompt tokens that the computing rank got from another, for all placements of a request.",
        )
        self._pulled_bytes = counter("isthmus_pulled_bytes", "KV bytes that were moved for them.")
        self._brought = counter(
            "isthmus_brought_tokens",
            "Prompt tokens that the computing rank got from its tiers.",
        )
        self._pulls = counter(
            "isthmus_pulls",
            "Placements with a source, by result: pulled; not_needed (the rank had it by then); or why it "
            "was computed: gone, evicted, busy, late, corrupt or failed.",
            ["result"],
        )
        for result in PULL_RESULTS:
            self._pulls.labels(result)
        self._moves = counter(
            "isthmus_request_moves",
            "Times a request left a failed rank (retry, before its first token; migration, after it) or a "
            "full (outgrown) or drained one (drained).",
            ["kind"],
        )
        for kind in ("retry", "migration", "outgrown", "drained"):
            self._moves.labels(kind)
        self._cut_off = counter(
            "isthmus_cut_off_answers",
            "Answers that ended before max_tokens and the model's context: no rank's pool held more of them.",
        )
        self._hits = _HitMetrics(registry)
        self.message_bytes = Gauge(
            "isthmus_router_message_bytes",
            "Bytes of clients' messages and bodies that are held until they are answered.",
            registry=registry,
        )
        self._messages_refused = counter(
            "isthmus_messages_refused",
            "Messages and bodies refused because too many bytes of others were held (--max-bytes-in-flight).",
        )
        self.running = Gauge("isthmus_router_running_requests", "Requests in flight.", registry=registry)

    def received(self) -> None:
        self._received.inc()

    def rejected(self, error: IsthmusError) -> None:
        self._requests[type(error).__name__,].inc()
        self._rejections.labels(type(error).__name__).inc()

    def message_refused(self) -> None:
        self._messages_refused.inc()

    def unauthenticated(self, front: str, reason: str) -> None:
        self._unauthenticated.labels(front, reason).inc()

    def placed(self, placed: Placed) -> None:
        self._placements[placed.plan.value, placed.decision.reason].inc()

    def first_token(self, progress: Progress) -> None:
        exemplar = traces.exemplar(progress.span)
        self._gen_ai.first_token(progress)
        if progress.first_token_s is not None:
            self._ttft.observe(progress.first_token_s, exemplar)
        if progress.stages is not None:
            for stage, seconds in zip(self._by_stage, progress.stages, strict=True):
                stage.observe(seconds, exemplar)

    def generated(self, num_tokens: int) -> None:
        self._completion.inc(num_tokens)

    def next_tokens(self, num_tokens: int, took_s: float) -> None:
        """Count the tokens of one more step of a stream, `took_s` after the last ones."""
        self._itl.observe(took_s / num_tokens, num_tokens)

    def drifted(self, num_tokens: int) -> None:
        if num_tokens:
            self._drift.inc(num_tokens)

    def past_answers(self, outcomes: Mapping[str, int]) -> None:
        for outcome, number in outcomes.items():
            self._past_answers.labels(outcome).inc(number)

    def moved(self, kind: str) -> None:
        self._moves.labels(kind).inc()

    def admitted(self, placed: Placed, admitted: Admitted, *, is_further: bool = False) -> None:
        """Count the first placement of an answer, as its usage does. Of a further answer to the same prompt
        only the tokens that its rank computed are new."""
        self._answers.inc()
        if is_further:
            self._prompt.inc(admitted.computed_tokens)
            self._computed.inc(admitted.computed_tokens)
            return
        self._prompt.inc(admitted.prompt_tokens)
        self._prompt_length.observe(admitted.prompt_tokens)
        self._computed.inc(admitted.computed_tokens)
        self._reused.inc(admitted.reused_tokens)
        self._hits.admitted(placed, admitted)

    def transferred(self, placed: Placed, admitted: Admitted) -> None:
        if admitted.kv_bytes_moved:
            self._moved.inc(admitted.kv_bytes_moved)
        if saved := admitted.kv_bytes_saved:
            self._saved.inc(saved)
        if admitted.brought_tokens:
            self._brought.inc(admitted.brought_tokens)
        if placed.decision.chosen.source is not None:
            self._pull_ended(admitted.pulled)

    def _pull_ended(self, pulled: Pulled | None) -> None:
        if pulled is None:
            self._pulls.labels("not_needed").inc()
        elif pulled.tokens:
            self._pulls.labels("pulled").inc()
            self._pulled.inc(pulled.tokens)
            self._pulled_bytes.inc(pulled.bytes)
        else:
            self._pulls.labels(pulled.refused if pulled.refused in PULL_RESULTS else "failed").inc()

    def ended(self, progress: Progress, outcome: str, took_s: float) -> None:
        self._gen_ai.ended(progress, outcome, took_s)
        self._requests[outcome,].inc()
        if progress.admitted is not None:
            self._output_length.observe(progress.completion_tokens)
        # A request that is "finished" without a token was aborted.
        if progress.first_token_s is None and outcome in ("finished", "cancelled", Aborted.__name__):
            self._abandoned.observe(took_s)
        for answer in progress.answers:
            if answer.reasoning_tokens:
                self._reasoning.inc(answer.reasoning_tokens)
            if answer.num_calls:
                self._read_calls.inc(answer.num_calls)
            if answer.num_broken_calls:
                self._broken_calls.inc(answer.num_broken_calls)
            if answer.finish_reason is FinishReason.CAPACITY:
                self._cut_off.inc()
        if progress.request.constraint:
            self._constrained.labels(progress.request.constraint).inc()
        if progress.admitted is None and outcome not in ("finished", "cancelled"):
            self._rejections.labels(outcome).inc()
        self._duration.observe(took_s, traces.exemplar(progress.span))


_HITS = {
    "placed_prompt": "Prompt tokens sent to the rank, by what may be cached there: held need not move, "
    "resumable need not be computed.",
    "predicted_hit": "Of the prompt tokens sent to the rank, those that the router believed to be cached "
    "there.",
    "delivered_hit": "Of the prompt tokens sent to the rank, those that were cached there.",
    "available_hit": "Of the prompt tokens sent to the rank, those that its role's best rank was believed to "
    "hold.",
}


class _HitMetrics:
    """These count prompt tokens by rank, and by what the cache was expected to save there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = [
            Counter(f"isthmus_{name}_tokens", meaning, _RANK_AND_KIND, registry=registry)
            for name, meaning in _HITS.items()
        ]
        self._of_rank: dict[tuple[str, ...], list[Counter]] = {}  # The keys are the labels.

    def admitted(self, placed: Placed, admitted: Admitted) -> None:
        chosen = placed.decision.chosen
        decode, prefill, delivered = chosen.decode, chosen.prefill, admitted.decode_prefix_len
        if prefill is None:
            delivered = admitted.own_reused_tokens
            self._count(Role.DECODE, decode.id, _RESUMABLE, decode.reused_tokens, delivered, placed, admitted)
            return
        self._count(Role.DECODE, decode.id, _HELD, decode.hit_tokens, delivered, placed, admitted)
        delivered = admitted.own_reused_tokens
        self._count(Role.PREFILL, prefill.id, _RESUMABLE, prefill.reused_tokens, delivered, placed, admitted)

    def _count(
        self,
        role: Role,
        rank: RankId,
        kind: str,
        predicted: int,
        delivered: int,
        placed: Placed,
        admitted: Admitted,
    ) -> None:
        # Workers keep their names over all incarnations, so the number of ranks limits the series.
        labels = (role.value, rank.worker, str(rank.rank), kind)
        if labels not in self._of_rank:
            self._of_rank[labels] = [metric.labels(*labels) for metric in self._metrics]
        available = max(delivered, placed.best_hit_tokens[role])
        counts = (admitted.prompt_tokens, predicted, delivered, available)
        for counter, tokens in zip(self._of_rank[labels], counts, strict=True):
            counter.inc(tokens)


class RankCollector(Collector):
    def __init__(self, cluster: Cluster, mirror: Mirror) -> None:
        self._cluster = cluster
        self._mirror = mirror

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "isthmus_rank_up",
            "1 while the router can use the rank; 0 while it is suspect, not connected or has failed, and "
            "for half an hour after it went without draining.",
            labels=_RANK,
        )
        blocks = GaugeMetricFamily(
            "isthmus_index_rank_blocks", "Index blocks that the rank is known to hold.", labels=_RANK
        )
        resumable = GaugeMetricFamily(
            "isthmus_index_rank_resumable_blocks",
            "Index blocks after which the rank can resume, of ranks that report them.",
            labels=_RANK,
        )
        staleness = GaugeMetricFamily(
            "isthmus_index_rank_staleness_seconds",
            "How far the router's knowledge of the rank's cache is behind.",
            labels=_RANK,
        )
        trust = GaugeMetricFamily(
            "isthmus_rank_trust",
            "Share of the tokens recently predicted as cached on the rank that it had.",
            labels=_RANK_AND_KIND,
        )
        for role in Role:
            for view in self._cluster.ranks(role):
                rank = view.registration.id.key
                labels = (role.value, rank.worker, str(rank.rank))
                up.add_metric(labels, self._cluster.is_up(view))
                blocks.add_metric(labels, self._mirror.index.num_blocks(rank))
                staleness.add_metric(labels, self._mirror.rank_staleness_s(rank))
                trust.add_metric((*labels, _HELD), self._cluster.trust(rank))
                if (num_resumable := self._cluster.num_resumable(view.registration)) is not None:
                    resumable.add_metric(labels, num_resumable)
                    trust.add_metric((*labels, _RESUMABLE), self._cluster.resume_trust(rank))
        for role, rank in self._cluster.missed():
            up.add_metric((role.value, rank.worker, str(rank.rank)), 0)
        yield from (up, blocks, resumable, staleness, trust)
