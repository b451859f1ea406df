"""Versions of etcd that must not be relied on."""

import logging
import re

from services.etcd.client import Etcd

logger = logging.getLogger(__name__)

_DIVERGES_BEFORE = (3, 5, 3)


def known_fault(version: str) -> str | None:
    """What is wrong with an etcd of that version ("3.5.1") that has several members; None: nothing known.

    A member of 3.5.0 to 3.5.2 that is killed while it writes can lose entries that it says it has applied.
    From then on it serves other data than the rest, and nobody notices (etcd issue 13766).
    """
    numbers = re.match(r"3\.5\.(\d+)(?!\d)", version)
    if numbers is None or (3, 5, int(numbers[1])) >= _DIVERGES_BEFORE:
        return None
    return "a member that is killed may lose entries for good, and serves them no more; use 3.5.3 or later"


async def warn_of_version(etcd: Etcd) -> None:
    """Log what is wrong with it, if anything is. Raises as Etcd.status."""
    if etcd.connection.num_endpoints == 1:
        return
    version = (await etcd.status()).version
    if (fault := known_fault(version)) is not None:
        logger.warning("etcd_version_faulty version=%s fault=%s", version, fault)
