"""A cluster's schema is what all its ranks and routers agree on, kept in etcd by whoever comes first."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.etcd.client import Etcd, warn_of_version
from services.index.keys import ClusterKeys
from services.index.message import fill, to_bytes
from services.values.errors import ConfigError, IsthmusError, Unavailable
from services.wire.isthmus.v1 import index_pb2

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Schema:
    """All ranks and routers of a cluster must agree on this."""

    index_block: int  # It counts tokens per index block.
    hash_scheme: str
    version: int = SCHEMA_VERSION


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
    """Check the schema for ever, again whenever etcd has been listed anew.

    etcd may have lost everything; then nobody else may write it for long, and whoever comes first decides
    what those after it must have. The log is warned of an etcd whose version is known not to keep what it was
    given.

    Raises ConfigError as check_schema the first time only: later it is the other who is wrong.
    """
    checked_at = -1  # It counts listings.
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
