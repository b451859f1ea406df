"""Our service and SGLang's processes exchange these messages, one line of JSON each. This module is pure.

The plugin sends reports to our service, and the service sends orders to a scheduler.
"""

import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from services.values.errors import ProtocolError
from services.values.kv import DraftKv, GroupKind, KvGroup

MAX_LINE_BYTES = 64 << 20

Kinds = Mapping[str, type[Any]]


def kinds_of(*classes: type[Any]) -> Kinds:
    return {cls.__name__: cls for cls in classes}


def encode(message: Any) -> bytes:
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    return json.dumps({"kind": type(message).__name__, **values}).encode() + b"\n"


def decode(line: bytes, kinds: Kinds) -> Any:
    """Return the message. Raises ProtocolError for a line that is none."""
    try:
        values = json.loads(line.decode())
        return kinds[values.pop("kind")](**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"a line that is none of {', '.join(kinds)}: {type(error).__name__}") from error


class LineSplitter:
    """This splits received bytes into whole lines.

    A line that is too long loses its beginning, and nobody can read it.
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []  # This is the beginning of a line whose end has not come.
        self._begun_bytes = 0

    def feed(self, received: bytes) -> list[bytes]:
        *whole, rest = received.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._begun, whole[0]])
            self._begun, self._begun_bytes = [], 0
        if self._begun_bytes + len(rest) > MAX_LINE_BYTES:
            self._begun, self._begun_bytes = [], 0
        if rest:
            self._begun.append(rest)
            self._begun_bytes += len(rest)
        return whole

    @property
    def has_begun(self) -> bool:
        return bool(self._begun)


@dataclass(frozen=True, slots=True)
class Active:
    """The plugin's manager is ready in a process of SGLang's."""

    role: str
    dp_rank: int
    tp_rank: int
    cp_rank: int
    pp_rank: int
    tp_size: int
    pid: int
    endpoint: str  # This is the endpoint of its Handshake, and empty on decode.
    page_size: int
    page_bytes: int  # These are the whole model's.
    num_pages: int
    dtype: str
    num_layers: int
    state_kinds: list[str]  # These are SGLang's words for what it stores beside the KV.
    # These are the layout's groups other than full attention, by `group_fields`.
    carried: list[dict[str, Any]]
    draft: dict[str, Any] | None  # This is the draft's KV, by `draft_fields`.
    topology: dict[str, Any]  # This is SGLang's own description of a prefill rank.


@dataclass(frozen=True, slots=True)
class TicketSent:
    """A decode process has sent prefill the target of a transfer's delta."""

    transfer_id: int
    decode_prefix_len: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Moved:
    """A prefill process has written a transfer's delta, counted where the writes are posted."""

    transfer_id: int
    num_pages: int
    size_bytes: int  # These are the pages' bytes.
    # These are the bytes of tails, states and the draft's KV, by SGLang's word for them.
    carried_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class PathFound:
    """A prefill process has written KV by a path that it had not used before."""

    dp_rank: int
    path_kind: str  # The name differs from `kind`, which is the report's own.
    reach: str
    lanes: str


@dataclass(frozen=True, slots=True)
class TreeEvents:
    """A DP rank's radix tree gained and lost these: SGLang's events, in order, as plain values."""

    dp_rank: int
    events: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Beat:
    """The loop of the plugin's Handshake runs in that process."""

    pid: int
    host: str  # Its node is reached there.


@dataclass(frozen=True, slots=True)
class Outputs:
    """Requests of a rank gained these tokens in one step of its scheduler, or ended.

    No request is in both fields.
    """

    chunks: list[
        dict[str, Any]
    ]  # They have rid, output_ids (new ones) and meta_info: SGLang's words, as over HTTP.
    # These are by rid the new ids of requests with nothing else to report, which are nearly all of a step's.
    tokens: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    load: dict[str, Any]  # This is in SGLang's own words (managers/load_snapshot.py).


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """SGLang has loaded or unloaded an adapter, or refused that."""

    change: str  # It is that of the order.
    error: str  # It is empty where all is well.


Report = Active | TicketSent | Moved | PathFound | TreeEvents | Beat | Outputs | Load | AdapterChanged
REPORTS = kinds_of(Active, TicketSent, Moved, PathFound, TreeEvents, Beat, Outputs, Load, AdapterChanged)


@dataclass(frozen=True, slots=True)
class Generate:
    # These are those of SGLang's TokenizedGenerateReqInput, with sampling_params as a dict and input_ids by
    # `pack_ids`.
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Abort:
    """This ends the request; it is no error where the request has ended already."""

    rid: str


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """A scheduler computes requests with this `lora_id` with the adapter that PEFT has saved there."""

    change: str
    lora_id: str
    name: str
    directory: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """A scheduler gives it up; no request needs it."""

    change: str
    lora_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Joining:
    """The service of another node asks the first node's what its part of SGLang is."""

    node_rank: int
    fingerprint: int  # This is its checkpoint's.


@dataclass(frozen=True, slots=True)
class Incarnation:
    """This is the worker whose part it is; the stream that brought it ends with the worker."""

    worker: str
    generations: list[int]  # The index is the DP rank.
    fingerprint: int


Order = Generate | Abort | LoadAdapter | UnloadAdapter
ORDERS = kinds_of(Generate, Abort, LoadAdapter, UnloadAdapter)
JOININGS, INCARNATIONS = kinds_of(Joining), kinds_of(Incarnation)


def pack_ids(ids: Iterable[int]) -> str:
    """Pack token ids of a prompt for JSON.

    A scheduler computes nothing while it reads them, and reading them as a list of numbers would take five
    times as long.
    """
    return b64encode(array("i", ids)).decode()


def unpack_ids(packed: str) -> "array[int]":
    """Return what `pack_ids` packed on this machine, as the 64-bit numbers that SGLang needs."""
    return array("q", np.frombuffer(b64decode(packed), np.int32).astype(np.int64).tobytes())


def group_fields(group: KvGroup) -> dict[str, Any]:
    return {**asdict(group), "kind": group.kind.value, "layer_ids": list(group.layer_ids)}


def group_of(fields: Mapping[str, Any]) -> KvGroup:
    kind, layer_ids = GroupKind(fields["kind"]), tuple(fields["layer_ids"])
    return KvGroup(**{**fields, "kind": kind, "layer_ids": layer_ids})


def draft_fields(draft: DraftKv | None) -> dict[str, Any] | None:
    if draft is None:
        return None
    return {"model_fingerprint": draft.model_fingerprint, "group": group_fields(draft.group)}


def draft_of(fields: Mapping[str, Any] | None) -> DraftKv | None:
    return DraftKv(fields["model_fingerprint"], group_of(fields["group"])) if fields is not None else None
