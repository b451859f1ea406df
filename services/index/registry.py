"""The cluster's schema and the ranks' registrations."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.errors import ConfigError, IsthmusError, ProtocolError, StaleGeneration, Unavailable
from services.index.etcd import Etcd
from services.index.keys import ClusterKeys
from services.index.message import fill, to_bytes
from services.kv.types import KvLayout, RankAddress, RankId, Role
from services.wire import convert
from services.wire.isthmus.v1 import index_pb2

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
# A capability of a decode rank whose engine computes no prompts: plan local does not work there.
REMOTE_ONLY = "remote-only"
# Of a decode rank whose engine counts penalties over its own output alone: a request that has penalties and
# output from elsewhere cannot go on there.
NO_MOVED_PENALTIES = "no-moved-penalties"
# Of a rank of either role that keeps no radix cache: no request will find there what an earlier one computed.
NO_CACHE = "no-cache"
_ATTEMPTS = 5
_UNSAID_VERSION = 1  # of the handshake: a rank from before registrations had one


@dataclass(frozen=True, slots=True)
class Schema:
    """What all ranks and routers of a cluster must agree on."""

    index_block: int  # tokens per index block
    hash_scheme: str
    version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class Registration:
    """What a rank says of itself for as long as its lease lives."""

    role: Role
    address: RankAddress
    layout: KvLayout
    model: str
    max_context_tokens: int  # that the rank can hold, prompt and output together; on prefill, the prompt
    total_pages: int
    engine: str
    model_path: str = ""
    capabilities: tuple[str, ...] = ()
    draining: bool = False  # takes no new requests: it is being stopped, or an operator wants it so
    handshake_version: int = _UNSAID_VERSION  # only ranks of one version are paired
    model_context_tokens: int = 0  # whatever its pool holds of it; 0: not said

    @property
    def id(self) -> RankId:
        return self.address.id


def encode_registration(registration: Registration) -> bytes:
    return to_bytes(
        index_pb2.Registration(
            role=convert.role_to_proto(registration.role),
            address=convert.address_to_proto(registration.address),
            layout=convert.layout_to_proto(registration.layout),
            model=registration.model,
            max_context_tokens=registration.max_context_tokens,
            capabilities=registration.capabilities,
            total_pages=registration.total_pages,
            model_path=registration.model_path,
            engine=registration.engine,
            draining=registration.draining,
            handshake_version=registration.handshake_version,
            model_context_tokens=registration.model_context_tokens,
        )
    )


def decode_registration(value: bytes) -> Registration:
    """Raises ProtocolError when the value is torn or can never be right."""
    pb = index_pb2.Registration()
    fill(pb, value)
    return Registration(
        role=convert.role_from_proto(pb.role),
        address=convert.address_from_proto(pb.address),
        layout=convert.layout_from_proto(pb.layout),
        model=pb.model,
        max_context_tokens=pb.max_context_tokens,
        total_pages=pb.total_pages,
        engine=pb.engine,
        model_path=pb.model_path,
        capabilities=tuple(pb.capabilities),
        draining=pb.draining,
        handshake_version=pb.handshake_version or _UNSAID_VERSION,
        model_context_tokens=pb.model_context_tokens,
    )


async def check_schema(etcd: Etcd, keys: ClusterKeys, schema: Schema) -> None:
    """Write the cluster's schema if nobody has; else compare with it.

    Raises:
        ConfigError: the cluster was set up otherwise; the message says how.
        Unavailable: etcd does not answer.
    """
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
    """For ever: check the schema, and again whenever etcd has been listed anew. It may have lost everything;
    then nobody else may write it for long, and whoever comes first decides what those after it must have.

    Raises ConfigError as check_schema the first time only: later it is the other who is wrong.
    """
    checked_at = -1  # so many listings
    while True:
        if (now := listings()) != checked_at:
            try:
                await check_schema(etcd, keys, schema)
                checked_at = now
            except ConfigError as error:
                if checked_at < 0:
                    raise
                checked_at = now
                logger.error("registry.schema_refused error=%s", error)
            except IsthmusError as error:
                logger.warning("registry.schema_unchecked error=%s", error)
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


async def register(
    etcd: Etcd, keys: ClusterKeys, registration: Registration, lease_id: int, *, take_over: bool = True
) -> None:
    """Put the registration under the lease.

    `take_over`: the first time in a life, when what is there can only be an earlier life's. Later a
    foreign registration is a later life's.

    Raises:
        StaleGeneration: another life has registered, and we must not take over.
        Unavailable, EtcdNoSpace, LeaseNotFound.
    """
    key, value = keys.registration(registration.id.key), encode_registration(registration)
    for _ in range(_ATTEMPTS):
        found = await etcd.get(key)
        if found is not None and not take_over:
            _check_own(registration.id, found.value)
        revision = found.mod_revision if found else 0
        if await etcd.compare_and_swap(key, value, revision, lease_id):
            logger.info("registry.registered rank=%s lease_id=%x", registration.id, lease_id)
            return
    raise Unavailable(f"the registration of rank {registration.id} is written by others all the time")


def _check_own(ours: RankId, value: bytes) -> None:
    try:
        found = decode_registration(value).id
    except ProtocolError as error:
        logger.warning("registry.overwrites rank=%s error=%s", ours, error)
        return  # whoever wrote that is no life of this rank
    if found.generation != ours.generation:
        raise StaleGeneration(f"another life of rank {ours} has registered: {found.generation:016x}")
