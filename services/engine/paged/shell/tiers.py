"""A rank's tiers are opened here, as its settings describe them, for the layout of its runner."""

import logging
import math
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from services.engine.paged.model_runner import ModelRunner
from services.engine.paged.tier_health import TierCounts
from services.engine.paged.tiered_pool import TieredPool
from services.engine.paged.tiering import Tiering
from services.kv.carried_cache import CarriedCache
from services.kv.prefix_cache import PrefixCache
from services.kv.tiers.books import TierBooks
from services.kv.tiers.records import LateTier, Stored
from services.kv.tiers.slot_spans import most_parts
from services.kv.tiers.tier_keys import layout_id
from services.kv.tiers.write_budget import WriteBudget
from services.observe.log_lines import event
from services.tier.copies import Clock, HostStaging, LoadEnd, NoSlots, Staging, TierSlots
from services.tier.shared import SharedFiles, name_of
from services.tier.slab import (
    FileCalls,
    Slab,
    SlabFails,
    SlabInUse,
    SlabShape,
    open_file,
    open_memory,
    slab_fault,
)
from services.tier.thread import TierHangs, TierThread, while_it_answers
from services.values.errors import ConfigError

log = logging.getLogger(__name__)

TIER_FORM = r"(memory|/[^:]*):[0-9]+(KiB|MiB|GiB|TiB)"
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# Pages are stored once the free ones are fewer than so many times those that are evicted ahead.
_MARGINS = 2
# A tier that was left out is tried again after so long, then after twice as long, and so on.
_RETRY_S, _MOST_RETRY_S = 30.0, 900.0

_Opened = tuple[Slab, list[Stored]]


@dataclass(frozen=True, slots=True)
class TierPlace:
    directory: Path | None
    size_bytes: int

    @classmethod
    def parse(cls, text: str) -> "TierPlace":
        where, size = text.rsplit(":", 1)
        number, unit = re.findall(r"([0-9]+)([A-Za-z]+)", size)[0]
        return cls(None if where == "memory" else Path(where), int(number) * _UNITS[unit])


def tier_places(texts: Iterable[str]) -> tuple[TierPlace, ...]:
    """Read what has TIER_FORM, the nearest first. Raises ConfigError where two are in one place."""
    places = tuple(map(TierPlace.parse, texts))
    if len({place.directory and os.path.normpath(place.directory) for place in places}) < len(places):
        raise ConfigError("--kv-tier: two tiers are in one place")
    return places


def check_room(shape: SlabShape, parts: int) -> None:
    """Raise ConfigError where a checkpoint of so many parts would take more than half of a tier.

    The tier would store none.
    """
    if 2 * parts > shape.num_slots:
        raise ConfigError(
            f"--kv-tier: {shape.size_bytes} bytes have no room for two checkpoints, of "
            f"{parts * shape.slot_bytes} bytes each"
        )


@dataclass(frozen=True, slots=True)
class TierSettings:
    places: tuple[TierPlace, ...] = ()  # The nearest tier comes first.
    rank: str = ""  # It distinguishes this rank's files from others'.
    memory_fd: int | None = None  # A supervisor holds this memory through restarts of the rank.
    calls: FileCalls = field(default_factory=FileCalls)
    call_limit_s: float = 120.0  # A disk that answers none within this is done without at the start.
    write_bytes_per_s: float = math.inf  # To all files together.
    shares: bool = False  # It reads what other ranks keep in the same directory.

    @property
    def memory_bytes(self) -> int:
        return sum(place.size_bytes for place in self.places if place.directory is None)


def open_tiers(
    settings: TierSettings,
    runner: ModelRunner,
    cache: PrefixCache,
    carried: CarriedCache,
    evict_ahead_pages: int,
    clock: Clock,
    wake: Callable[[], None],
) -> tuple[Tiering | None, Collection[int]]:
    """Open the tiers and start their thread; return None where there are none, and which are left out now.

    A tier is left out where its disk fails, is full or does not answer, or where another process has its
    file: the rank serves without it, and tries again. Once it is open it comes behind the others. Raise
    ConfigError where its flag is wrong, and Unavailable where memory is short now.
    """
    if not settings.places or not cache.enabled:
        return None, ()
    layout, block_tokens = runner.layout, carried.index_block
    pool = TieredPool(cache, carried, runner.draft, layout, block_tokens)
    with ExitStack() as opened:
        found, places, absent = list[_Opened](), list[TierPlace](), list[tuple[TierPlace, SlabShape]]()
        for place in settings.places:
            shape = SlabShape.fitting(layout_id(layout, block_tokens), pool.slot_bytes, place.size_bytes)
            check_room(shape, most_parts(layout, shape.slot_bytes))
            if (each := _open_in_time(settings, place, shape)) is not None:
                found.append(each)
                places.append(place)
                opened.callback(each[0].close)
            else:
                absent.append((place, shape))
        slabs = [slab for slab, _ in found]
        in_files = [place.directory is not None for place in (*places, *(place for place, _ in absent))]
        books = TierBooks([*(slab.shape.num_slots for slab in slabs), *(0 for _ in absent)], in_files)
        books.load([*(records for _, records in found), *(() for _ in absent)])
        for slab in slabs:
            event(log, "kv_tier", where=slab.name, slots=slab.shape.num_slots, bytes=slab.shape.size_bytes)
        blocks, points = books.num_blocks, books.num_points
        event(log, "kv_tiers_found", blocks=blocks, tokens=blocks * block_tokens, checkpoints=points)
        shared = _others_files(settings, slabs, in_files, shape)
        staging = _staging(runner, pool.slot_bytes)
        opened.pop_all()
    to_read: list[TierSlots] = [
        *slabs,
        *(NoSlots() for _ in absent),
        *([shared] if shared is not None else []),
    ]
    tiering = Tiering(
        books,
        lambda done: TierThread(to_read, staging, done),
        pool,
        max(_MARGINS * evict_ahead_pages, pool.block_pages),
        clock,
        wake,
        WriteBudget(settings.write_bytes_per_s, clock()),
        shared,
    )
    return tiering, _try_again(settings, tiering, shared, dict(enumerate(absent, start=len(slabs))))


def _try_again(
    settings: TierSettings,
    tiering: Tiering,
    shared: SharedFiles | None,
    absent: Mapping[int, tuple[TierPlace, SlabShape]],
) -> set[int]:
    """Try to open these tiers while the rank serves, each on a thread of its own, for its disk may hang.

    Return those that are still left out, as a set that shrinks."""
    left, opening = set(absent), threading.Lock()

    def until_open(place: TierPlace, shape: SlabShape) -> None:
        wait_s = _RETRY_S
        while not tiering.thread.stopped.wait(wait_s):
            wait_s = min(2 * wait_s, _MOST_RETRY_S)
            try:
                slab, records = _open(settings, place, shape, settings.calls)
            except (SlabInUse, SlabFails) as error:
                event(log, "kv_tier_still_left_out", why=str(error))
                continue
            except ConfigError as error:  # Someone has made another thing of its place.
                event(log, "kv_tier_left_out", level=logging.ERROR, why=str(error))
                return
            with opening:  # The first one comes next behind those that are open: no others are filled.
                in_files = place.directory is not None
                tier = min(tier for tier in left if tiering.books.in_files[tier] is in_files)
                if tiering.open_late(LateTier.of(tier, shape.num_slots, records), slab):
                    left.discard(tier)
                    event(log, "kv_tier_opened_late", where=slab.name, slots=shape.num_slots)
                    if in_files and shared is not None:
                        shared.begin(_shared_directory(slab))
                else:
                    slab.close()
            return

    for arguments in absent.values():
        threading.Thread(target=until_open, args=arguments, name="tier-opens", daemon=True).start()
    return left


def _staging(runner: ModelRunner, slot_bytes: int) -> Staging:
    if (staging := runner.staging(slot_bytes)) is not None:
        return staging
    drafts = () if runner.draft is None else (runner.draft.memory,)
    pools = (runner.memory, *runner.carried_memory, *drafts)
    return HostStaging(slot_bytes, runner.layout.unit_bytes, pools)


def _others_files(
    settings: TierSettings, slabs: Sequence[Slab], in_files: Sequence[bool], shape: SlabShape
) -> SharedFiles | None:
    """Return what other ranks keep in the directory of the nearest tier that is an open file.

    Where none is open yet, it is the one that is opened first: a disk that hangs would hold up all tiers.
    """
    if not settings.shares:
        return None
    own = next((slab for slab, is_file in zip(slabs, in_files, strict=False) if is_file), None)
    directory = None if own is None else _shared_directory(own)
    name = "" if directory is None else _name_in_time(settings, directory)
    return SharedFiles(directory, settings.rank, shape, settings.calls, name)


def _shared_directory(own: Slab) -> Path:
    return Path(own.name).parent.parent


def _name_in_time(settings: TierSettings, directory: Path) -> str:
    """Return the name of a directory that ranks share; empty where it has none, so that routers do not know
    who reads what is there."""
    try:
        limit_s = settings.call_limit_s
        return while_it_answers(lambda _: name_of(directory), settings.calls, limit_s, lambda _: None)
    except (OSError, TierHangs) as error:
        event(log, "kv_tier_shared_without_name", level=logging.WARNING, where=directory, why=str(error))
        return ""


def _open_in_time(settings: TierSettings, place: TierPlace, shape: SlabShape) -> _Opened | None:
    """Return None where it is done without: everything is computed then."""
    open_it = partial(_open, settings, place, shape)
    try:
        return while_it_answers(open_it, settings.calls, settings.call_limit_s, _close)
    except (SlabInUse, SlabFails) as error:  # Two users would corrupt it.
        event(log, "kv_tier_left_out", level=logging.ERROR, why=str(error))
    except TierHangs as error:
        log.critical("tier_hangs where=%s limit_s=%g\n%s", place.directory, settings.call_limit_s, error)
    return None


def _open(settings: TierSettings, place: TierPlace, shape: SlabShape, calls: FileCalls) -> _Opened:
    if place.directory is None:
        slab = open_memory(settings.memory_fd, shape, calls)
    else:
        slab = open_file(place.directory, settings.rank, shape, calls)
    try:
        return slab, slab.records()
    except OSError as error:
        slab.close()
        raise slab_fault(slab.name, error) from error


def _close(opened: _Opened) -> None:
    opened[0].close()


def tier_metrics(counts: TierCounts | None, num_left_out: int = 0) -> Iterator[Metric]:
    moved = CounterMetricFamily(
        "isthmus_tier_bytes",
        "Bytes of KV that went between the pool and its tiers: direction is down (stored) or up (read).",
        labels=["direction"],
    )
    tokens = CounterMetricFamily(
        "isthmus_tier_tokens",
        "Tokens whose KV these bytes are; ahead: of those in files that were read while a request waited; "
        "shared: of those up that other ranks' files had.",
        labels=["direction"],
    )
    lookups = CounterMetricFamily(
        "isthmus_tier_lookups",
        "Prompts that were looked up below the pool: hit (a tier holds more than the pool) or miss.",
        labels=["outcome"],
    )
    reads = CounterMetricFamily(
        "isthmus_tier_reads",
        "Reads of prefixes by their end: whole; stopped (late, or the request ended); slow (computing was "
        "faster); corrupt (a digest differs); failed (an I/O error); gone (its owner, another "
        "rank, has overwritten it).",
        labels=["end"],
    )
    written = CounterMetricFamily(
        "isthmus_tier_file_written_bytes",
        "Bytes of KV written to files of --kv-tier, from the pool or from a tier above; what wears a disk.",
    )
    errors = CounterMetricFamily(
        "isthmus_tier_errors", "Reads and writes of tiers that failed, were late or came changed."
    )
    off = GaugeMetricFamily(
        "isthmus_tier_off", "1 while a tier is left alone: it failed, or is slower than computing."
    )
    left_out = GaugeMetricFamily(
        "isthmus_tier_left_out",
        "Tiers of --kv-tier that the rank could not open yet, and does without: the disk failed, was full or "
        "did not answer, or another process had the file.",
    )
    left_out.add_metric([], num_left_out)
    blocks = GaugeMetricFamily(
        "isthmus_tier_blocks",
        "Slots of tiers (blocks of the index, parts of checkpoints): the room, and what is held.",
        labels=["state"],
    )
    if counts is not None:
        _add(moved, {"down": counts.bytes_down, "up": counts.bytes_up})
        _add(tokens, {"down": counts.tokens_down, "up": counts.tokens_up, "ahead": counts.tokens_ahead})
        _add(tokens, {"shared": counts.tokens_shared})
        _add(lookups, {"hit": counts.hits, "miss": counts.misses})
        _add(reads, {end.value: counts.loads.get(end.value, 0) for end in LoadEnd})
        written.add_metric([], counts.file_bytes)
        errors.add_metric([], counts.errors)
        off.add_metric([], counts.is_off)
        _add(blocks, {"room": counts.slots, "held": counts.held})
    yield from (moved, tokens, lookups, reads, written, errors, off, left_out, blocks)


def _add(metric: CounterMetricFamily | GaugeMetricFamily, values: dict[str, int]) -> None:
    for label, value in values.items():
        metric.add_metric([label], value)
