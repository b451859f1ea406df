"""What the plugin tells our service, over a Unix socket of the service's: one line of JSON per report.

SGLang's processes connect and never wait: a thread of the plugin's writes what is queued. Reports of one
process arrive in order, none is lost while both live; a service that ends takes its SGLang with it.
"""

import asyncio
import json
import logging
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from services.values.errors import ProtocolError
from services.values.kv import DraftKv, GroupKind, KvGroup

log = logging.getLogger(__name__)

_MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Active:
    """The plugin's manager stands in a process of SGLang's."""

    role: str
    dp_rank: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    tp_size: int
    pid: int
    endpoint: str  # of its Handshake; empty on decode
    page_size: int
    page_bytes: int  # of the whole model
    num_pages: int
    dtype: str
    num_layers: int
    state_kinds: list[str]  # SGLang's words for what it keeps beside the KV
    carried: list[dict[str, Any]]  # the layout's groups beside full attention, by `group_fields`
    draft: dict[str, Any] | None  # the draft's KV, by `draft_fields`
    keys_are_pairs: bool  # of its radix tree: of neighbouring tokens
    topology: dict[str, Any]  # SGLang's own description of a prefill rank


@dataclass(frozen=True, slots=True)
class TicketSent:
    """A decode process has told prefill where a room's delta goes."""

    room: int
    decode_prefix_len: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A prefill process has written a room's delta, counted where the writes are posted."""

    room: int
    num_pages: int
    size_bytes: int  # of pages
    carried_bytes: dict[str, int]  # of tails and states, by SGLang's word for them, and of the draft's KV


@dataclass(frozen=True, slots=True)
class PathFound:
    """A prefill process has written KV by a way by which it had not before."""

    dp_rank: int
    path_kind: str  # `kind` is the report's own
    reach: str
    lanes: str


@dataclass(frozen=True, slots=True)
class TreeEvents:
    """What a DP rank's radix tree gained and lost: SGLang's events, in order, as plain values."""

    dp_rank: int
    events: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Beat:
    """The loop of the plugin's Handshake runs in that process."""

    pid: int


Report = Active | TicketSent | Moved | PathFound | TreeEvents | Beat
_KINDS: dict[str, type[Any]] = {
    cls.__name__: cls for cls in (Active, TicketSent, Moved, PathFound, TreeEvents, Beat)
}


def encode_report(report: Report) -> bytes:
    return json.dumps({"kind": type(report).__name__, **asdict(report)}).encode() + b"\n"


def decode_report(line: bytes) -> Report:
    """Raises ProtocolError."""
    try:
        fields = json.loads(line)
        report: Report = _KINDS[fields.pop("kind")](**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"a report that is none: {type(error).__name__}") from error
    return report


def group_fields(group: KvGroup) -> dict[str, Any]:
    """As JSON has it."""
    return {**asdict(group), "kind": group.kind.value, "layer_ids": list(group.layer_ids)}


def group_of(fields: Mapping[str, Any]) -> KvGroup:
    """What `group_fields` made, read from JSON."""
    kind, layer_ids = GroupKind(fields["kind"]), tuple(fields["layer_ids"])
    return KvGroup(**{**fields, "kind": kind, "layer_ids": layer_ids})


def draft_fields(draft: DraftKv | None) -> dict[str, Any] | None:
    if draft is None:
        return None
    return {"model_fingerprint": draft.model_fingerprint, "group": group_fields(draft.group)}


def draft_of(fields: Mapping[str, Any] | None) -> DraftKv | None:
    """What `draft_fields` made, read from JSON."""
    return DraftKv(fields["model_fingerprint"], group_of(fields["group"])) if fields is not None else None


class Reporter:
    """In a process of SGLang's; `report` may be called from any thread and never blocks."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._queue: queue.SimpleQueue[Report] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="isthmus-reports", daemon=True).start()

    def report(self, report: Report) -> None:
        self._queue.put(report)

    def _write(self) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(self._path)
                while True:
                    connection.sendall(encode_report(self._queue.get()))
        except OSError as error:  # the service has ended; so will this process
            log.error("sglang_reports_lost error=%s", error)


async def serve_reports(
    path: str,
    take: Callable[[Report], None],
    unreadable: Callable[[ProtocolError], None],
    ended: Callable[[], None],
) -> asyncio.Server:
    """On the running loop: `take` gets every report, or `unreadable` why it is none; `ended` is called when a
    process that reports ends."""

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                try:
                    report = await _next_report(reader)
                except ProtocolError as error:
                    unreadable(error)
                    continue
                if report is None:
                    return
                take(report)
        except ConnectionError:
            log.info("sglang_reports_reset")
        finally:
            writer.close()
            ended()

    return await asyncio.start_unix_server(read, path, limit=_MAX_LINE_BYTES)


async def _next_report(reader: asyncio.StreamReader) -> Report | None:
    """None at the end, where a process that was killed may leave half a line. Raises ProtocolError."""
    try:
        line = await reader.readline()
    except ValueError as error:  # what has come of it is dropped, the rest is no report either
        raise ProtocolError("a report is too long") from error
    return decode_report(line) if line.endswith(b"\n") else None
