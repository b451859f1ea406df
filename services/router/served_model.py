"""This module opens a model that a router serves: what its directory says, a cluster of its ranks, and the
Generator that answers for it."""

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from services.grammar.grammars import Grammars
from services.index.pins import PinWriter
from services.index.read.mirror import Mirror
from services.net.channels import TlsConfig
from services.observe import log_lines, prometheus
from services.router.cluster import Cluster, ClusterSettings
from services.router.dialects.sampling import OPENAI, SamplingDefaults, defaults_of
from services.router.parsing.parser_choice import PROBE, PROBE_SCHEMA, ParserChoice, choose
from services.router.placement.placer import PlacerSettings
from services.router.placement.price import PriceWeights
from services.router.ranks.balance import Balance
from services.router.request.generation import Generator
from services.router.request.progress import Progress
from services.router.request.router_metrics import RankCollector, RouterMetrics
from services.router.router_config import RouterConfig
from services.router.tenants import Tenants
from services.router.text.answer_ends import EndOfSequence
from services.router.text.prompt import most_message_bytes
from services.router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedCheckpoint:
    """This is what a model's directory says to a router."""

    tokenizer: Tokenizer
    defaults: SamplingDefaults
    parsers: ParserChoice

    @property
    def most_message_bytes(self) -> int:
        """Return the bytes of a client's message that the context can need."""
        return most_message_bytes(self.tokenizer.context_tokens, self.tokenizer.vocab_size)


@dataclass(frozen=True, slots=True)
class Model:
    """`path` is its directory. `registry` has its metrics."""

    name: str
    generator: Generator
    cluster: Cluster
    defaults: SamplingDefaults
    path: str
    registry: CollectorRegistry


@dataclass(frozen=True, slots=True)
class Surroundings:
    """All models of a router share these. `served_names` returns the names that a client may use; `ended` is
    called with each request that ends and its outcome."""

    mirror: Mirror
    pins: PinWriter
    tls: TlsConfig | None
    tenants: Tenants | None
    served_names: Callable[[], Sequence[str]]
    ended: Callable[[Progress, str], None]


def read_checkpoint(config: RouterConfig) -> ServedCheckpoint:
    """Read the model's directory, which takes seconds. Raises ConfigError."""
    tokenizer = Tokenizer(
        config.model, config.chat_template, reads_controls=config.control_tokens == "special"
    )
    _log_ends(tokenizer.end_of_sequence)
    return ServedCheckpoint(tokenizer, _sampling_defaults(config, tokenizer), _parsers(config, tokenizer))


def _log_ends(end: EndOfSequence) -> None:
    stated = ",".join(map(str, end.stated))
    log_lines.event(log, "end_of_sequence", source=end.source, stated=stated, tokenizer=end.tokenizer)


def _parsers(config: RouterConfig, tokenizer: Tokenizer) -> ParserChoice:
    parsers = choose(
        config.tool_parser,
        config.reasoning_parser,
        tokenizer.chat_template,
        tokenizer.response_template,
        tokenizer.shown_call(PROBE.name, PROBE.arguments, PROBE_SCHEMA),
    )
    log_lines.event(log, "parsers", tools=parsers.tools, reasoning=parsers.reasoning)
    return parsers


def _sampling_defaults(config: RouterConfig, tokenizer: Tokenizer) -> SamplingDefaults:
    if config.sampling_defaults == "openai":
        return OPENAI
    defaults = defaults_of(tokenizer.generation_config)
    log_lines.event(log, "sampling_defaults", **asdict(defaults))
    return defaults


@contextlib.asynccontextmanager
async def open_model(
    config: RouterConfig, checkpoint: ServedCheckpoint, around: Surroundings, metrics: RouterMetrics
) -> AsyncIterator[Model]:
    """Serve the model for as long as the context lasts: follow its ranks, and answer requests."""
    cluster = Cluster(
        _cluster_settings(config),
        around.mirror,
        around.pins,
        Balance(time.monotonic, chunk_tokens=config.chunk_size),
        around.tls,
        coalesce_s=config.coalesce_ms / 1e3,
    )
    await cluster.start()
    try:
        generator = Generator(
            config.served_name,
            checkpoint.tokenizer,
            cluster,
            metrics,
            max_attempts=config.max_attempts,
            max_wait_s=config.max_wait_s,
            request_timeout_s=config.request_timeout_s,
            max_priority=config.max_priority,
            heeds_deadlines=config.heed_deadlines == "on",
            keep_thinking=config.keep_thinking == "always",
            grammars=Grammars(Path(config.model), checkpoint.tokenizer.vocab_size),
            parsers=checkpoint.parsers,
            keeps_strict=config.strict_tools == "keep",
            tenants=around.tenants,
            served_names=around.served_names,
        )
        generator.listen(around.ended)
        metrics.running.set_function(lambda: generator.num_running)
        metrics.remembered_answers.set_function(lambda: generator.remembered_answer_bytes)
        metrics.registry.register(prometheus.OnLoop(RankCollector(cluster, around.mirror)))
        yield Model(
            config.served_name, generator, cluster, checkpoint.defaults, config.model, metrics.registry
        )
    finally:
        await cluster.close()


def _cluster_settings(config: RouterConfig) -> ClusterSettings:
    return ClusterSettings(
        model_name=config.served_name,
        plans=config.plan_set,
        placer=PlacerSettings(
            config.index_block,
            config.chunk_size,
            PriceWeights(itl_weight=config.itl_weight),
            pulls=config.pull == "on",
        ),
    )
