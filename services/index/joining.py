"""A process joins a cluster in etcd: all agree on its schema, which the first one writes; ranks register."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.etcd.etcd_client import Etcd, warn_of_version
from services.index.codec import fill, to_bytes
from services.index.keys import ClusterKeys
from services.values.errors import ConfigError, IsthmusError, ProtocolError, StaleGeneration, Unavailable
from services.values.rank import RankId
from services.values.rank_reports import Registration
from services.wire import convert
from services.wire.fields import message_of, value_of
from services.wire.isthmus.v1 import index_pb2

logger = logging.getLogger(__name__)

_UNSAID_VERSION = 1  # Ranks of releases without a handshake version in registrations have this version.

_ATTEMPTS = 5


def encode_registration(registration: Registration) -> bytes:
    return to_bytes(
        message_of(
            index_pb2.Registration,
            registration,
            role=convert.role_to_proto(registration.role),
            address=convert.address_to_proto(registration.address),
            layout=convert.layout_to_proto(registration.layout),
            handshake_version=registration.layout.handshake_version,
            adapters=map(convert.adapter_to_proto, registration.adapters),
        )
    )


def decode_registration(value: bytes) -> Registration:
    pb = index_pb2.Registration()
    fill(pb, value)
    return value_of(
        Registration,
        pb,
        role=convert.role_from_proto(pb.role),
        address=convert.address_from_proto(pb.address),
        layout=convert.layout_from_proto(pb.layout, pb.handshake_version or _UNSAID_VERSION),
        adapters=tuple(map(convert.adapter_from_proto, pb.adapters)),
    )


async def registered(etcd: Etcd, keys: ClusterKeys) -> list[Registration]:
    """Return the cluster's ranks. Raises Unavailable when etcd does not answer."""
    _, found = await etcd.snapshot(keys.registrations)
    ranks: list[Registration] = []
    for kv in found:
        try:
            ranks.append(decode_registration(kv.value))
        except ProtocolError as error:
            logger.warning("registration_unreadable key=%r error=%s", kv.key, error)
    return ranks


async def register(
    etcd: Etcd, keys: ClusterKeys, registration: Registration, lease_id: int, *, take_over: bool = True
) -> None:
    """Put the registration under the lease.

    Set `take_over` the first time of an incarnation, when any other registration is from an earlier one.
    Later another registration is from a later incarnation.

    Raises:
        StaleGeneration: Another incarnation has registered, and `take_over` is not set.
        Unavailable, EtcdNoSpace, LeaseNotFound: etcd did not accept the write.
    """
    key, value = keys.registration(registration.id.key), encode_registration(registration)
    for _ in range(_ATTEMPTS):
        found = await etcd.get(key)
        if found is not None and not take_over:
            _check_own(registration.id, found.value)
        revision = found.mod_revision if found else 0
        if await etcd.compare_and_swap(key, value, revision, lease_id):
            logger.info("rank_registered rank=%s lease_id=%x", registration.id, lease_id)
            return
    raise Unavailable(f"the registration of rank {registration.id} is written by others all the time")


def _check_own(ours: RankId, value: bytes) -> None:
    try:
        found = decode_registration(value).id
    except ProtocolError as error:
        logger.warning("registration_overwritten rank=%s error=%s", ours, error)
        return  # No incarnation of this rank can have written that.
    if found.generation != ours.generation:
        raise StaleGeneration(f"another life of rank {ours} has registered: {found.generation:016x}")


SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Schema:
    index_block: int  # This is the number of tokens in an index block.
    hash_scheme: str
    version: int = SCHEMA_VERSION


async def check_schema(etcd: Etcd, keys: ClusterKeys, schema: Schema) -> None:
    """Write the cluster's schema if there is none. Raises ConfigError, with the difference, if it has another
    one, and Unavailable if etcd does not answer."""
    value = to_bytes(
        index_pb2.Schema(
            version=schema.version, index_block=schema.index_block, hash_scheme=schema.hash_scheme
        )
    )
    for _ in range(_ATTEMPTS):
        found = await etcd.get(keys.schema)
        if found is not None:
            return _compare(keys.cluster, found.value, schema)
        if await etcd.create(keys.schema, value):
            return None
    raise Unavailable("the cluster's schema key appears and disappears")


async def keep_schema(
    etcd: Etcd, keys: ClusterKeys, schema: Schema, listings: Callable[[], int], interval_s: float = 1.0
) -> None:
    """Check the schema for ever, again after each new listing of etcd.

    etcd may have lost everything; then a process must soon write the schema again, and the first one decides
    what the others must have. It also logs a warning if etcd's version is known to lose data.

    Raises ConfigError as check_schema does, but only the first time: later the other processes are wrong.
    """
    checked_at = -1  # This is the number of listings at the last check.
    while True:
        if (now := listings()) != checked_at:
            try:
                await check_schema(etcd, keys, schema)
                if checked_at < 0:
                    await warn_of_version(etcd)
                checked_at = now
            except ConfigError as error:
                if checked_at < 0:
                    raise
                checked_at = now
                logger.error("schema_refused error=%s", error)
            except IsthmusError as error:
                logger.warning("schema_unchecked error=%s", error)
        await asyncio.sleep(interval_s)


def _compare(cluster: str, value: bytes, ours: Schema) -> None:
    pb = index_pb2.Schema()
    fill(pb, value)
    theirs = Schema(pb.index_block, pb.hash_scheme, pb.version)
    if theirs != ours:
        raise ConfigError(
            f"cluster {cluster!r} was set up with {_describe(theirs)}, this process has {_describe(ours)}; "
            "give it the same settings or another cluster name"
        )


def _describe(schema: Schema) -> str:
    blocks = f"{schema.index_block} tokens per index block"
    return f"schema version {schema.version}, {blocks}, hashes {schema.hash_scheme}"
