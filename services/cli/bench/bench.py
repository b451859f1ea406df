"""`isthmus bench` measures a cluster under a load."""

import asyncio
import importlib
import importlib.util
import json
import secrets
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from services.cli import screen
from services.cli.bench import workload
from services.cli.bench.meter import Meter, figures_of, lines_of
from services.cli.bench.sides import GrpcSide, HttpSide, LoadTarget, Url, vocab_size_of
from services.cli.bench.workload import Chance, LoadSession, closed_loop, count_lines, open_loop, read_trace
from services.cli.router_client import MODEL_NAME_HELP, ClientConfig, key_metadata
from services.settings.flags import Bounds, check_bounds, load, setting
from services.values.errors import ConfigError, root_cause

_SOME, _SHARE = Bounds(at_least=1), Bounds(at_least=0, at_most=1)
_NOT_NEGATIVE, _ABOVE_0 = Bounds(at_least=0), Bounds(above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(ClientConfig):
    """Send a load of random tokens to a router; report throughput, latencies, hits and moved KV.

    Prompts are a function of the seed. Definitions are those of sglang.bench_serving.
    """

    workload: Literal["random", "shared-prefix", "multi-turn", "trace"] = setting(
        "random",
        "prompts that share nothing, groups that share a prefix, conversations, or those of --trace",
        bare="WORKLOAD",
    )
    rate: float | None = setting(
        None, "open loop: requests (or conversations) a second, a Poisson process", bounds=_ABOVE_0
    )
    concurrency: int | None = setting(
        None, "requests at a time; without --rate a closed loop of so many, by default 8", bounds=_SOME
    )
    num_prompts: int = setting(100, "requests; conversations; lines of a trace, at most", bounds=_SOME)
    input_len: int = setting(256, "tokens of a prompt; of multi-turn, of each question", bounds=_SOME)
    output_len: int = setting(64, "tokens of an answer", bounds=_SOME)
    range_ratio: float = setting(1.0, "lengths are drawn from this share of theirs upwards", bounds=_SHARE)
    num_turns: int = setting(4, "multi-turn: turns of a conversation", bounds=_SOME)
    gsp_num_groups: int = setting(8, "shared-prefix: groups", bounds=_SOME)
    gsp_prompts_per_group: int = setting(16, "shared-prefix: prompts of a group", bounds=_SOME)
    gsp_system_prompt_len: int = setting(512, "shared-prefix: tokens of a group's prefix", bounds=_SOME)
    gsp_question_len: int = setting(128, "shared-prefix: tokens of a prompt behind it", bounds=_SOME)
    gsp_output_len: int = setting(64, "shared-prefix: tokens of an answer", bounds=_SOME)
    trace: Path | None = setting(None, "JSON lines of timestamp, input_length, output_length, hash_ids")
    trace_scale: float = setting(1.0, "lengths of the trace are multiplied by it", bounds=_ABOVE_0)
    slowdown: float = setting(1.0, "the trace's time is stretched by it", bounds=_ABOVE_0)
    seed: int = setting(0, "the same seed sends the same requests", bounds=_NOT_NEGATIVE)
    warm_up: int = setting(1, "requests that are sent first, and not measured", bounds=_NOT_NEGATIVE)
    reuse: bool = setting(
        False, "let prompts find KV of earlier runs; otherwise each run has a tenant of its own"
    )
    model: str = setting("", MODEL_NAME_HELP)
    http: str = setting("", "URL of an OpenAI API to use instead of gRPC")
    vocab_size: int | None = setting(None, "tokens to draw from; default: found by trying ids", bounds=_SOME)
    timeout_s: float = setting(600.0, "seconds after which a request is given up", bounds=_ABOVE_0)
    json: Path | None = setting(None, "write the figures to this file")
    plot: Path | None = setting(None, "draw them into this PNG file; needs the extra isthmus[plots]")

    def __post_init__(self) -> None:
        check_bounds(self)
        if (self.workload == "trace") != (self.trace is not None):
            raise ConfigError("--workload=trace and --trace=FILE go together")
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot wants matplotlib: pip install 'isthmus[plots]'")

    @property
    def is_open(self) -> bool:
        """Return whether requests are sent at given times; a trace has its own, unless only a concurrency is
        given.
        """
        return self.rate is not None or (self.workload == "trace" and self.concurrency is None)


_STOPPED = 130  # A shell reports this code after Ctrl-C.
_USUAL_CONCURRENCY = 8
_WARM_UP_OUTPUT = 32
_BAR_EVERY_S = 0.25


def run(argv: list[str]) -> int:
    config = load(BenchConfig, argv, prog="isthmus bench")
    return asyncio.run(_bench(config))


async def _bench(config: BenchConfig) -> int:
    side = open_side(config)
    try:
        meter = await _measured(config, side)
    finally:
        await side.close()
    _report(config, side, meter)
    if meter.stopped:
        return _STOPPED
    return 1 if meter.errors or not meter.completed else 0


def _report(config: BenchConfig, side: LoadTarget, meter: Meter) -> None:
    print("\n".join(lines_of(meter, screen.width())))
    if config.json is not None:
        figures = {"settings": _settings(config, side), **figures_of(meter)}
        config.json.write_text(json.dumps(figures, indent=2) + "\n")
    if config.plot is not None:
        title = f"isthmus bench {config.workload} over {side.name}: {meter.completed} requests"
        importlib.import_module("services.cli.bench.plots").draw(meter, config.plot, title)


async def _measured(config: BenchConfig, side: LoadTarget) -> Meter:
    total = total_of(config)
    chance = Chance(config.seed, config.vocab_size or await vocab_size_of(side))
    await _warm_up(config, chance, side)
    meter = Meter(time.perf_counter)
    loop = asyncio.get_running_loop()
    async with _bar(meter, total):
        sending = asyncio.create_task(send(config, chance, side, meter))
        loop.add_signal_handler(signal.SIGINT, sending.cancel)
        try:
            await asyncio.wait([sending])
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            sending.cancel()
    meter.stopped = sending.cancelled()
    if not meter.stopped and (error := sending.exception()) is not None:
        raise root_cause(error)
    return meter


async def _warm_up(config: BenchConfig, chance: Chance, side: LoadTarget) -> None:
    output_len = min(_WARM_UP_OUTPUT, config.output_len)
    sessions = workload.warm_up(chance, config.warm_up, config.input_len, output_len)
    meter = Meter(time.perf_counter)
    await closed_loop(side, sessions, config.concurrency or 1, meter)
    if meter.errors and not meter.completed:  # Then the load would fail, too.
        name, sentence = next(iter(meter.first_errors.items()))
        raise ConfigError(f"no warm-up request was answered: {name}: {sentence}")


async def send(config: BenchConfig, chance: Chance, side: LoadTarget, meter: Meter) -> None:
    sessions = sessions_of(config, chance)
    if config.rate is not None:
        sessions = workload.arriving(chance, sessions, config.rate)
    if config.is_open:
        await open_loop(side, sessions, config.concurrency, meter, time.perf_counter)
    else:
        await closed_loop(side, sessions, config.concurrency or _USUAL_CONCURRENCY, meter)


def sessions_of(config: BenchConfig, chance: Chance) -> Iterator[LoadSession]:
    lengths = (config.input_len, config.output_len, config.range_ratio)
    match config.workload:
        case "random":
            return workload.conversations(chance, config.num_prompts, 1, *lengths)
        case "multi-turn":
            return workload.conversations(chance, config.num_prompts, config.num_turns, *lengths)
        case "trace":
            lines = read_trace(config.trace or Path(), config.num_prompts)
            return workload.replayed(chance, lines, config.slowdown, config.trace_scale)
        case _:
            return workload.shared_prefixes(
                chance,
                config.gsp_num_groups,
                config.gsp_prompts_per_group,
                config.gsp_system_prompt_len,
                config.gsp_question_len,
                config.gsp_output_len,
                config.range_ratio,
            )


def total_of(config: BenchConfig) -> int:
    match config.workload:
        case "shared-prefix":
            return config.gsp_num_groups * config.gsp_prompts_per_group
        case "multi-turn":
            return config.num_prompts * config.num_turns
        case "trace":
            return count_lines(config.trace or Path(), config.num_prompts)
        case _:
            return config.num_prompts


def open_side(config: BenchConfig) -> LoadTarget:
    metadata = key_metadata(config.api_key_file)
    tenant = "" if config.reuse else f"bench-{secrets.token_hex(4)}"
    if not config.http:
        return GrpcSide(config.open_channel(), metadata, config.model, tenant, config.timeout_s)
    url = Url.parse(config.http)
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
    except OSError as error:
        raise ConfigError(f"--tls-ca: {error}") from error
    return HttpSide(url, dict(metadata), config.model, tenant, config.timeout_s, context)


def _settings(config: BenchConfig, side: LoadTarget) -> Mapping[str, object]:
    given = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    return given | {"api": side.name}


@asynccontextmanager
async def _bar(meter: Meter, total: int, console: Console | None = None) -> AsyncIterator[None]:
    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        yield
        return
    columns = TextColumn("{task.completed}/{task.total}"), BarColumn(None), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[now]}"), console=console, transient=True) as progress:
        bar = progress.add_task("", total=total, now=_now(meter))
        following = asyncio.create_task(_follow(meter, progress, bar))
        try:
            yield
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


async def _follow(meter: Meter, progress: Progress, bar: TaskID) -> None:
    while True:
        progress.update(bar, completed=meter.completed + meter.errors.total(), now=_now(meter))
        await asyncio.sleep(_BAR_EVERY_S)


def _now(meter: Meter) -> str:
    failed = f"  {meter.errors.total()} failed" if meter.errors else ""
    ttft_ms, itl_ms = 1e3 * meter.ttft.mean, 1e3 * meter.itl.mean
    return f"{meter.running} running  TTFT {ttft_ms:.0f} ms  ITL {itl_ms:.1f} ms{failed}"
