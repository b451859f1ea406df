"""Ranks register in etcd."""

import logging

from services.etcd.client import Etcd
from services.index.keys import ClusterKeys
from services.index.message import fill, to_bytes
from services.values.errors import ProtocolError, StaleGeneration, Unavailable
from services.values.rank import RankId
from services.values.registration import Registration
from services.wire import convert
from services.wire.fields import message_of, value_of
from services.wire.isthmus.v1 import index_pb2

logger = logging.getLogger(__name__)

_UNSAID_VERSION = 1  # Ranks from before registrations had a handshake version speak this one.

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
        )
    )


def decode_registration(value: bytes) -> Registration:
    """Return the registration. Raises ProtocolError when the value is torn or can never be right."""
    pb = index_pb2.Registration()
    fill(pb, value)
    return value_of(
        Registration,
        pb,
        role=convert.role_from_proto(pb.role),
        address=convert.address_from_proto(pb.address),
        layout=convert.layout_from_proto(pb.layout, pb.handshake_version or _UNSAID_VERSION),
    )


async def register(
    etcd: Etcd, keys: ClusterKeys, registration: Registration, lease_id: int, *, take_over: bool = True
) -> None:
    """Put the registration under the lease.

    `take_over` is set for the first time of an incarnation, when what is there can only be an earlier one's.
    Later a foreign registration is a later incarnation's.

    Raises:
        StaleGeneration: another incarnation has registered, and we must not take over.
        Unavailable, EtcdNoSpace, LeaseNotFound: etcd did not take it.
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
        return  # Whoever wrote that is no incarnation of this rank.
    if found.generation != ours.generation:
        raise StaleGeneration(f"another life of rank {ours} has registered: {found.generation:016x}")
