"""`isthmus top` shows ranks, requests and how much of their prompts was found, live.

It reads a router's stream of reports, and opens it again after it breaks off.
"""

import asyncio
import json
import os
import sys
import termios
import time
import tty
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import grpc.aio
from google.protobuf import json_format
from rich.console import Console
from rich.live import Live
from rich.text import Text

from services.cli import screen
from services.cli.look.cluster_picture import Picture
from services.cli.look.top_drawing import ASCII, BLOCKS, draw
from services.cli.router_client import ClientConfig, key_metadata, naming
from services.process.signals import stop_on_signals
from services.settings.flags import Bounds, check_bounds, load, setting
from services.values.errors import (
    DeadlineExceeded,
    Forbidden,
    IsthmusError,
    NoCapacity,
    PeerFailed,
    Unavailable,
)
from services.wire.isthmus.v1 import generation_pb2_grpc
from services.wire.isthmus.v1.generation_pb2 import WatchClusterRequest, WatchClusterResponse

_AGAIN_S = 1.0
# A router, or a proxy in front of it, may restart. Other errors will not go away by themselves.
_PASSING = (Unavailable, PeerFailed, NoCapacity, DeadlineExceeded)


@dataclass(frozen=True, slots=True)
class News:
    response: WatchClusterResponse
    is_first: bool  # It is the first report of its stream.
    of_all: bool  # The report covers all tenants.


@dataclass(frozen=True, slots=True)
class Away:
    reason: str


Open = Callable[[WatchClusterRequest], grpc.aio.UnaryStreamCall]


async def follow(
    open_call: Open,
    router: str,
    interval_s: float,
    tenant: str,
    with_candidates: bool = False,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncGenerator[News | Away, None]:
    """Yield the reports on `tenant`; if it is empty, those on all tenants, or on the ones that the router
    lets us see. Raises any error before the first report, and later those that a retry cannot mend."""
    request = WatchClusterRequest(
        interval_s=interval_s, tenant=tenant, all_tenants=not tenant, no_candidates=not with_candidates
    )
    has_begun = False
    while True:
        reason = f"{router} has ended its stream"
        call = open_call(request)
        try:
            with naming(router):
                is_first = True
                async for response in call:
                    yield News(response, is_first, request.all_tenants)
                    is_first, has_begun = False, True
        except Forbidden:
            if not request.all_tenants:
                raise
            request.all_tenants = False
            continue
        except IsthmusError as error:
            if not has_begun or not isinstance(error, _PASSING):
                raise
            # The advice behind this is cut off, since we retry ourselves.
            reason = str(error).partition(": `")[0]
        finally:
            call.cancel()
        yield Away(f"{reason}; trying again")
        await sleep(_AGAIN_S)


_REDRAW_S = 0.2  # It waits this long between redraws, however fast requests end.
_AGES_GROW_S = 1.0
_PLAIN_WIDTH, _PLAIN_FINISHED = 80, 10
_HINT = "q leaves"
_LEAVE = frozenset(b"qQ\x03\x04")  # Ctrl-C and Ctrl-D also leave if they arrive as characters.

_Feed = AsyncGenerator[News | Away, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig(ClientConfig):
    """Show ranks, the requests that run and those that ended, as it happens; q leaves.

    Into a pipe it prints plain text, one picture each interval.
    """

    tenant: str = setting("", "whose requests to show; default: all tenants', or those that the key may see")
    interval_s: float = setting(
        1.0, "seconds between two pictures", bounds=Bounds(at_least=0.1, at_most=60.0)
    )
    window_s: float = setting(
        60.0,
        "seconds over which totals and hit rates are computed",
        bounds=Bounds(at_least=1.0, at_most=3600.0),
    )
    once: bool = setting(False, "print one picture, without ended requests, and exit")
    json: bool = setting(False, "print the router's reports instead, one JSON object a line")
    color: screen.Color = setting("auto", screen.COLOR_HELP)

    def __post_init__(self) -> None:
        check_bounds(self)


def run(argv: list[str]) -> int:
    return asyncio.run(_top(load(TopConfig, argv, prog="isthmus top")))


async def _top(config: TopConfig) -> int:
    stopping = stop_on_signals()
    shown = asyncio.create_task(_show(config, stopping.set))
    stopped = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((shown, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        shown.cancel()
    with suppress(asyncio.CancelledError):
        await shown
    return 0


async def _show(config: TopConfig, leave: Callable[[], None]) -> None:
    async with _news(config) as news:
        if config.json:
            await _print_json(news, config.once)
        elif config.once or screen.width() is None:
            await _print_plain(news, config)
        else:
            with _leaving(leave):
                await _draw_live(news, config)


@asynccontextmanager
async def _news(config: TopConfig) -> AsyncIterator[_Feed]:
    metadata = key_metadata(config.api_key_file)
    async with config.open_channel() as channel:
        watch = generation_pb2_grpc.GenerationStub(channel).WatchCluster
        news = follow(
            lambda request: watch(request, metadata=metadata),
            config.router,
            config.interval_s,
            config.tenant,
            with_candidates=config.json,  # The pictures do not show them.
        )
        async with aclosing(news):
            yield news


async def _print_json(news: _Feed, once: bool) -> None:
    async for each in news:
        if isinstance(each, Away):
            print(f"isthmus top: {each.reason}", file=sys.stderr, flush=True)
            continue
        report = json_format.MessageToDict(each.response, preserving_proto_field_name=True)
        print(json.dumps(report, separators=(",", ":")), flush=True)
        if once:
            return


async def _print_plain(news: _Feed, config: TopConfig) -> None:
    view, printed_s = _View(config), float("-inf")
    async for each in news:
        view.add(each)
        if isinstance(each, Away):
            print(f"isthmus top: {each.reason}", file=sys.stderr, flush=True)
        elif time.monotonic() - printed_s >= 0.9 * config.interval_s:
            printed_s = time.monotonic()
            view.print()
            if config.once:
                return
            print(flush=True)


async def _draw_live(news: _Feed, config: TopConfig) -> None:
    view = _View(config)
    following = asyncio.create_task(_follow(news, view))
    following.add_done_callback(lambda task: view.received.set())
    try:
        with Live(console=view.console, screen=True, auto_refresh=False) as live:
            while not following.done():
                live.update(view.drawn(), refresh=True)
                await view.news_or(_AGES_GROW_S)
                await asyncio.sleep(_REDRAW_S)
        await following
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(news: _Feed, view: "_View") -> None:
    async for each in news:
        view.add(each)


class _View:
    def __init__(self, config: TopConfig) -> None:
        self._config = config
        self._picture = Picture(config.window_s, time.monotonic())
        self._of_all = not config.tenant
        self.console: Console = screen.console(sys.stdout, config.color)
        self._glyphs = BLOCKS if self.console.encoding.startswith("utf") else ASCII
        self.received = asyncio.Event()

    def add(self, news: News | Away) -> None:
        if isinstance(news, Away):
            self._picture.away = news.reason
        else:
            self._of_all = news.of_all
            self._picture.add(news.response, time.monotonic(), news.is_first)
        self.received.set()

    async def news_or(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.received.wait(), timeout_s)
        self.received.clear()

    def drawn(self) -> Text:
        width, height = self.console.size
        return draw(
            self._picture,
            time.monotonic(),
            width,
            height,
            title=self._title(),
            hint=_HINT,
            glyphs=self._glyphs,
        )

    def print(self) -> None:
        width = screen.width() or _PLAIN_WIDTH
        text = draw(
            self._picture,
            time.monotonic(),
            width,
            title=self._title(),
            most_finished=_PLAIN_FINISHED,
            glyphs=self._glyphs,
        )
        self.console.print(text, soft_wrap=True, highlight=False)

    def _title(self) -> str:
        whose = "all tenants" if self._of_all else f"tenant {self._config.tenant}" * bool(self._config.tenant)
        return f"{self._config.router}  {whose or 'own requests'}"


@contextmanager
def _leaving(leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave` when q is typed, and do not echo what is typed. Without a terminal it does nothing."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, 64)
        if not typed:  # The terminal is closed.
            loop.remove_reader(descriptor)
        if not typed or _LEAVE.intersection(typed):
            leave()

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSADRAIN)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
