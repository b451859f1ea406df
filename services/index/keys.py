"""This pure module has the keys in etcd.

    /isthmus/<cluster>/schema
    /isthmus/<cluster>/ranks/<worker>/<rank>
    /isthmus/<cluster>/prefix/<worker>/<rank>/head
    /isthmus/<cluster>/prefix/<worker>/<rank>/snapshot/<epoch>/<chunk>
    /isthmus/<cluster>/prefix/<worker>/<rank>/log/<seq>
    /isthmus/<cluster>/below/<worker>/<rank>/...    likewise, of what lies below the rank's pool
    /isthmus/<cluster>/pins/<name>              name: 32 hex digits of the conversation's hash
    /isthmus/<cluster>/probe/<router>

Epochs, chunks and sequence numbers are padded with zeros, so that keys are sorted by number.
"""

import hashlib
import re
from dataclasses import dataclass, field
from functools import lru_cache

from services.values.errors import ConfigError
from services.values.rank import RankKey

# The names of clusters, workers and routers are parts of keys, and must match this.
NAME = r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,199}"
NAME_FORM = "1 to 200 letters, digits or ._:@- and start with no sign"
_DIGITS = 20  # The largest unsigned 64-bit number has this many digits.


@dataclass(frozen=True, slots=True)
class SchemaKey:
    pass


@dataclass(frozen=True, slots=True)
class RegistrationKey:
    rank: RankKey


@dataclass(frozen=True, slots=True)
class HeadKey:
    rank: RankKey
    below: bool = False  # The record is of the rank's tiers, and not of its pool.


@dataclass(frozen=True, slots=True)
class SnapshotKey:
    rank: RankKey
    epoch: int
    chunk: int
    below: bool = False


@dataclass(frozen=True, slots=True)
class LogKey:
    rank: RankKey
    seq: int
    below: bool = False


@dataclass(frozen=True, slots=True)
class PinKey:
    name: str


@dataclass(frozen=True, slots=True)
class ProbeKey:
    router: str


ParsedKey = SchemaKey | RegistrationKey | HeadKey | SnapshotKey | LogKey | PinKey | ProbeKey


def check_name(kind: str, name: str) -> str:
    """Return `name` if it can be part of a key. Raises ConfigError that names its `kind`."""
    if not re.fullmatch(NAME, name):
        raise ConfigError(f"the {kind} name {name!r} must be {NAME_FORM}")
    return name


def pin_name(conversation: str) -> str:
    """Return a conversation's name in keys, a hash: ids may be long, contain anything, and be private."""
    return hashlib.blake2b(conversation.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """These are the keys of one cluster. Raises ConfigError if a name cannot be part of a key.

    With `of_tiers` the keys of a rank's records are those of what lies below its pool.
    """

    cluster: str
    of_tiers: bool = False
    # Every key of the cluster begins with this, and no key of another cluster does.
    prefix: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        prefix = f"/isthmus/{check_name('cluster', self.cluster)}/".encode()
        object.__setattr__(self, "prefix", prefix)

    @property
    def schema(self) -> bytes:
        return self.prefix + b"schema"

    @property
    def registrations(self) -> bytes:
        return self.prefix + b"ranks/"

    def registration(self, rank: RankKey) -> bytes:
        return self.registrations + _rank_path(rank)

    @property
    def below(self) -> "ClusterKeys":
        return ClusterKeys(self.cluster, of_tiers=True)

    def rank_prefix(self, rank: RankKey) -> bytes:
        return self.prefix + (b"below/" if self.of_tiers else b"prefix/") + _rank_path(rank) + b"/"

    def head(self, rank: RankKey) -> bytes:
        return self.rank_prefix(rank) + b"head"

    def snapshot_prefix(self, rank: RankKey) -> bytes:
        return self.rank_prefix(rank) + b"snapshot/"

    def snapshot_epoch(self, rank: RankKey, epoch: int) -> bytes:
        return self.snapshot_prefix(rank) + _number(epoch) + b"/"

    def snapshot(self, rank: RankKey, epoch: int, chunk: int) -> bytes:
        return self.snapshot_epoch(rank, epoch) + _number(chunk)

    def log_prefix(self, rank: RankKey) -> bytes:
        return self.rank_prefix(rank) + b"log/"

    def log(self, rank: RankKey, seq: int) -> bytes:
        return self.log_prefix(rank) + _number(seq)

    @property
    def pins(self) -> bytes:
        return self.prefix + b"pins/"

    def pin(self, name: str) -> bytes:
        return self.pins + check_name("pin", name).encode()

    def probe(self, router: str) -> bytes:
        return self.prefix + b"probe/" + check_name("router", router).encode()

    def parse(self, key: bytes) -> ParsedKey | None:
        """Return what the key names, or None if we write no such key. It never raises."""
        if not key.startswith(self.prefix):
            return None
        parts = key[len(self.prefix) :].decode("utf-8", "replace").split("/")
        try:
            return _parse(parts)
        except ConfigError:
            return None


@lru_cache(maxsize=1 << 14)
def _rank_path(rank: RankKey) -> bytes:
    return f"{check_name('worker', rank.worker)}/{rank.rank}".encode()


def _number(value: int) -> bytes:
    return f"{value:0{_DIGITS}d}".encode()


def _parse(parts: list[str]) -> ParsedKey | None:
    match parts:  # The most frequent kinds come first.
        case ["prefix" | "below" as place, worker, rank, *record]:
            return _parse_record(_parse_rank(worker, rank), record, below=place == "below")
        case ["ranks", worker, rank]:
            return RegistrationKey(_parse_rank(worker, rank))
        case ["schema"]:
            return SchemaKey()
        case ["pins", name]:
            return PinKey(check_name("pin", name))
        case ["probe", router]:
            return ProbeKey(check_name("router", router))
    return None


def _parse_record(rank: RankKey, parts: list[str], *, below: bool) -> ParsedKey | None:
    match parts:
        case ["log", seq]:
            return LogKey(rank, _parse_number(seq), below)
        case ["snapshot", epoch, chunk]:
            return SnapshotKey(rank, _parse_number(epoch), _parse_number(chunk), below)
        case ["head"]:
            return HeadKey(rank, below)
    return None


@lru_cache(maxsize=1 << 14)  # A mirror parses thousands of keys of the same ranks a second.
def _parse_rank(worker: str, rank: str) -> RankKey:
    if not (rank.isascii() and rank.isdigit()) or (rank != "0" and rank.startswith("0")) or len(rank) > 9:
        raise ConfigError(f"not a rank number: {rank!r}")
    return RankKey(check_name("worker", worker), int(rank))


def _parse_number(text: str) -> int:
    if len(text) != _DIGITS or not (text.isascii() and text.isdigit()):
        raise ConfigError(f"not a padded number: {text!r}")
    return int(text)
