"""These are a rank's Prometheus metrics: its load, read when scraped, its requests' ends, and its role's
own."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.engine.base import DecodeEngine, PrefillEngine
from services.values.errors import DeadlineExceeded, KvCorrupt, PeerFailed
from services.values.kv import KvPath
from services.values.rank import Plan, TakenOver
from services.values.rank_reports import RankLoad
from services.values.request import Admitted, PrefillResult, Pulled

_UP_TO_A_SECOND = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
# The last bucket ends at the longest wait of a request, the routers' --max-wait-s.
SECONDS = (*_UP_TO_A_SECOND, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class DigestMetrics:
    """A rank has one for all that is written into its pools, whoever asked for it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._mismatches = Counter(
            "isthmus_kv_digest_mismatches",
            "Transfers and pulls that were given up because pages differed from what was sent.",
            registry=registry,
        )
        self._digested = Counter(
            "isthmus_kv_digested_pages",
            "Received pages that were compared with the digests of what was written.",
            registry=registry,
        )

    def note(self, digested_pages: int, *, differ: bool = False) -> None:
        self._digested.inc(digested_pages)
        self._mismatches.inc(differ)


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.digests = DigestMetrics(registry)
        self._requests = Counter(
            "isthmus_rank_requests",
            "Requests of this rank by how they ended: finished, cancelled, or the error's name.",
            ["outcome"],
            registry=registry,
        )
        self._outcome = cache(self._requests.labels)
        self._outcome("finished")  # Alerts need it from the start.
        self._transfer_failures = Counter(
            "isthmus_transfer_failures",
            "Requests of this rank that ended because the rank at the other end of the transfer failed.",
            registry=registry,
        )
        self._pulls = Counter(
            "isthmus_pulls",
            "Sources that this rank asked for what they hold of a prompt, by outcome: pulled, or why it "
            "computed instead: evicted, busy, gone, late, corrupt or failed.",
            ["outcome"],
            registry=registry,
        )
        self._pulled_tokens = Counter(
            "isthmus_pulled_tokens",
            "Prompt tokens that sources wrote into this rank's pool.",
            registry=registry,
        )
        self._pulled_bytes = Counter("isthmus_pulled_bytes", "KV bytes of those.", registry=registry)
        self._pull_seconds = Histogram(
            "isthmus_pull_seconds",
            "A source asked until its KV was there, or it was given up.",
            buckets=(*_UP_TO_A_SECOND, 2.5, 5.0, 10.0, 30.0),  # A rank does not wait longer.
            registry=registry,
        )

    def pulled(self, pulled: Pulled) -> None:
        self._pulls.labels(pulled.refused or "pulled").inc()
        self.digests.note(pulled.digested_pages, differ=pulled.refused == "corrupt")
        self._pulled_tokens.inc(pulled.tokens)
        self._pulled_bytes.inc(pulled.bytes)
        self._pull_seconds.observe(pulled.seconds)

    @contextmanager
    def counted(self) -> Iterator[None]:
        outcome = "finished"
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        except TimeoutError:  # The request's own deadline has passed.
            outcome = DeadlineExceeded.__name__
            raise
        except BaseException as error:
            outcome = type(error).__name__
            if isinstance(error, PeerFailed):
                self._transfer_failures.inc()
            raise
        finally:
            self._outcome(outcome).inc()


def _kv_paths(paths: Sequence[KvPath]) -> Metric:
    metric = GaugeMetricFamily(
        "isthmus_kv_path",
        "1 for each way by which this rank has written KV: kind is rdma, tcp, cuda_ipc, shared_memory or "
        "unknown, lanes are the transport's own words.",
        labels=["kind", "reach", "lanes"],
    )
    for path in paths:
        metric.add_metric([path.kind.value, path.reach, path.lanes], 1)
    return metric


def _carried(load: RankLoad) -> Iterator[Metric]:
    units = GaugeMetricFamily(
        "isthmus_carried_units",
        "Pages of windows, or states, in the pools beside full attention's, free or used; group is the "
        "pool's place in the layout.",
        labels=["group", "kind", "state"],
    )
    for pool in load.carried:
        for state, count in (("free", pool.free), ("used", pool.total - pool.free)):
            units.add_metric([str(pool.group), pool.kind, state], count)
    yield units
    for name, note in (("checkpoints", ""), ("resume_points", " Now isthmus_{}checkpoints.")):
        yield GaugeMetricFamily(
            f"isthmus_{name}",
            "Places in cached prefixes with tails of windows and a state to go on computing from."
            + note.format(""),
            load.checkpoints,
        )
        yield CounterMetricFamily(
            f"isthmus_evicted_{name}",
            "Checkpoints given up for others that save more, or for sequences." + note.format("evicted_"),
            load.evicted_points,
        )


def _drafts(load: RankLoad) -> Iterator[Metric]:
    drafted = CounterMetricFamily(
        "isthmus_drafted_tokens",
        "Tokens that were drafted and verified, by source: lookup (the request's own text), tree and ngrams "
        "(others of its cache salt), draft (a small model).",
        labels=["source"],
    )
    accepted = CounterMetricFamily(
        "isthmus_accepted_draft_tokens", "Of drafted tokens, those that were right.", labels=["source"]
    )
    for count in load.drafts:
        drafted.add_metric([count.source], count.drafted)
        accepted.add_metric([count.source], count.accepted)
    yield drafted
    yield accepted
    yield GaugeMetricFamily(
        "isthmus_tokens_per_step",
        "Moving average of the tokens that a decoding sequence gets in a step. 0: not known yet, or engine "
        "sglang.",
        load.tokens_per_step,
    )


def _constraints(load: RankLoad) -> Iterator[Metric]:
    counts = load.constraints
    yield CounterMetricFamily(
        "isthmus_rank_constrained_requests",
        "Requests under a constraint, where they are prefilled and where they are decoded.",
        counts.requests,
    )
    yield CounterMetricFamily(
        "isthmus_compiled_constraints", "Of these, those whose constraint was compiled anew.", counts.compiled
    )
    yield CounterMetricFamily(
        "isthmus_constraint_compile_seconds", "What that took, off the event loop.", counts.compile_s
    )
    yield CounterMetricFamily(
        "isthmus_masked_tokens", "Tokens chosen under a constraint's mask, drafts too.", counts.masked_tokens
    )
    yield CounterMetricFamily(
        "isthmus_mask_seconds", "What their masks took, beside the model's computing.", counts.mask_s
    )


class PoolCollector(Collector):
    def __init__(self, load: Callable[[], RankLoad]) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        pages = GaugeMetricFamily("isthmus_kv_pages", "Pages of the KV pool by state.", labels=["state"])
        for state in ("free", "cached", "locked", "private", "quarantined"):
            pages.add_metric([state], getattr(load.books, state))
        yield pages
        yield from _carried(load)
        yield _kv_paths(load.kv_paths)
        yield from _drafts(load)
        yield from _constraints(load)
        yield GaugeMetricFamily("isthmus_running_requests", "Sequences that hold pages.", load.running)
        yield GaugeMetricFamily("isthmus_waiting_requests", "Sequences that wait for pages.", load.waiting)
        yield GaugeMetricFamily(
            "isthmus_queue_wait_seconds",
            "Until a sequence that comes now has pages, as others get them now; 0: nobody waits.",
            load.queue_wait_s,
        )
        yield GaugeMetricFamily(
            "isthmus_pending_tokens", "Prompt tokens still to compute.", load.pending_tokens
        )
        yield GaugeMetricFamily(
            "isthmus_reserved_pages", "Kept back for the growth of what runs.", load.reserved_pages
        )
        yield CounterMetricFamily(
            "isthmus_retractions",
            "Times that a sequence gave its pages to others and waited again.",
            load.retractions,
        )
        yield CounterMetricFamily(
            "isthmus_rank_computed_tokens",
            "Prompt tokens that the rank computed, for failed requests and again after a retraction or a "
            "move, too. Engine sglang: not counted.",
            load.computed_tokens,
        )
        yield CounterMetricFamily(
            "isthmus_overtakes", "Times that one waiting was passed by another.", load.overtakes
        )
        yield GaugeMetricFamily(
            "isthmus_open_rooms",
            "Transfers in which this rank writes that are not over.",
            load.open_transfers,
        )
        yield GaugeMetricFamily(
            "isthmus_granted_pages", "Pages kept for pulls of other ranks.", load.granted_pages
        )
        yield GaugeMetricFamily("isthmus_free_page_runs", "Runs of neighbouring free pages.", load.free_runs)
        yield CounterMetricFamily(
            "isthmus_lent_pages", "Pages lent to prompts, several at a time.", load.lent_pages
        )
        yield CounterMetricFamily(
            "isthmus_lent_page_runs", "Runs of neighbours in which they were lent.", load.lent_runs
        )
        yield CounterMetricFamily(
            "isthmus_unreadable_cache_events",
            "Unreadable events of engine sglang's cache: the index then forgets this rank's blocks.",
            load.unreadable_events,
        )
        steps = HistogramMetricFamily(
            "isthmus_engine_step_seconds",
            "Engine steps by duration: kind decode, of single tokens only, and prompt. Engine sglang: "
            "decode, by the mean of each quarter of a second.",
            labels=["kind"],
        )
        for kind, counted in (("decode", load.decode_steps), ("prompt", load.prompt_steps)):
            steps.add_metric([kind], buckets=list(counted.cumulative()), sum_value=counted.sum_s)
        yield steps
        yield GaugeMetricFamily("isthmus_step_seconds", "Moving average of an engine step.", load.step_s)
        yield GaugeMetricFamily(
            "isthmus_compute_tokens_per_second",
            "The rate at which a newcomer's prompt would be computed beside what runs; 0: not measured yet. "
            "Engine sglang: the mean since the start.",
            load.prefill_tokens_per_s,
        )


class EngineCollector(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


class HandOverMetrics:
    def __init__(self, registry: CollectorRegistry, digests: DigestMetrics) -> None:
        self._digests = digests
        self._tokens = Counter(
            "isthmus_hand_over_tokens",
            "Tokens of cached prefixes: handed to other ranks by this one when it was drained or stopped, "
            "left here, or taken over from ranks that left.",
            ["outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            "isthmus_hand_over_received_bytes",
            "KV bytes pulled from ranks that left, to take over what they had cached.",
            registry=registry,
        )
        for outcome in ("handed", "left", "taken"):
            self._tokens.labels(outcome)

    def ended(self, handed_tokens: int, left_tokens: int) -> None:
        self._tokens.labels("handed").inc(handed_tokens)
        self._tokens.labels("left").inc(left_tokens)

    def took(self, taken: TakenOver) -> None:
        self._tokens.labels("taken").inc(taken.pulled_tokens)
        self._bytes.inc(taken.pulled_bytes)
        self._digests.note(taken.digested_pages, differ=taken.refused == "corrupt")


class DecodeMetrics(RequestMetrics):
    def __init__(self, registry: CollectorRegistry, engine: DecodeEngine) -> None:
        super().__init__(registry)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        registry.register(PoolCollector(engine.load))
        self._prompt_tokens = counter("isthmus_decode_prompt_tokens", "Prompt tokens of admitted requests.")
        self._prefix_tokens = counter(
            "isthmus_decode_prefix_tokens", "Of those, tokens found in this rank's cache."
        )
        self._generated = counter("isthmus_decode_generated_tokens", "Tokens generated.")
        self._received = counter("isthmus_decode_received_bytes", "KV bytes written into this rank's pools.")
        self._carried = counter(
            "isthmus_decode_carried_bytes",
            "Of received bytes, tails of windows and recurrent states, which come with every transfer.",
            ["kind"],
        )
        self._queue = histogram(
            "isthmus_decode_queue_seconds",
            "Request received until its pages are reserved and its prefill rank is connected.",
            buckets=SECONDS,
        )
        self._transfer = histogram(
            "isthmus_decode_transfer_seconds",
            "What is left of the prefill leg beside queue and computing: its calls, and writes not hidden.",
            buckets=SECONDS,
        )

    @contextmanager
    def counted(self) -> Iterator[None]:
        try:
            with super().counted():
                yield
        except KvCorrupt:
            self.digests.note(0, differ=True)
            raise

    def admitted(self, admitted: Admitted, exemplar: dict[str, str] | None) -> None:
        self._prompt_tokens.inc(admitted.prompt_tokens)
        own, pulled = admitted.plan is Plan.LOCAL, admitted.pulled
        self._prefix_tokens.inc(admitted.decode_prefix_len - (pulled.tokens if own and pulled else 0))
        if own and pulled is not None:
            self.pulled(pulled)
        self._received.inc(admitted.kv_bytes_moved)
        for kind, size_bytes in admitted.carried_bytes.items():
            self._carried.labels(kind).inc(size_bytes)
        self.digests.note(admitted.digested_pages)
        self._queue.observe(admitted.decode_queue_s, exemplar)
        if admitted.plan is Plan.REMOTE:
            self._transfer.observe(admitted.transfer_s, exemplar)

    def generated(self, num_tokens: int) -> None:
        self._generated.inc(num_tokens)


class PrefillMetrics(RequestMetrics):
    def __init__(
        self, registry: CollectorRegistry, engine: PrefillEngine, *, expects_rdma: bool = False
    ) -> None:
        super().__init__(registry)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        registry.register(PoolCollector(engine.load))
        Gauge(
            "isthmus_kv_rdma_expected",
            "1 where KV is to cross by RDMA: --expect-kv-path=rdma.",
            registry=registry,
        ).set(expects_rdma)
        self._prefix_tokens = counter(
            "isthmus_prefill_prefix_tokens",
            "Prompt tokens found in this rank's cache, of requests whose KV was sent.",
        )
        self._computed_tokens = counter(
            "isthmus_prefill_computed_tokens",
            "Prompt tokens computed for requests whose KV was sent; isthmus_rank_computed_tokens counts all.",
        )
        self._sent = counter("isthmus_prefill_sent_bytes", "KV bytes written to decode ranks.")
        self._queue = histogram(
            "isthmus_prefill_queue_seconds",
            "Request received until its prompt's first chunk, without a pull.",
            buckets=SECONDS,
        )
        self._compute = histogram(
            "isthmus_prefill_compute_seconds",
            "A prompt's first chunk until the first token.",
            buckets=SECONDS,
        )

    def prefilled(self, result: PrefillResult, exemplar: dict[str, str] | None) -> None:
        self._prefix_tokens.inc(result.prefill_prefix_len - (result.pulled.tokens if result.pulled else 0))
        if result.pulled is not None:
            self.pulled(result.pulled)
        self._computed_tokens.inc(result.computed_tokens)
        self._sent.inc(result.kv_bytes_moved)
        self._queue.observe(result.queue_s, exemplar)
        self._compute.observe(result.compute_s, exemplar)
