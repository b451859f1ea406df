"""This module has the reasons why a router's index, or a rank's publishing, is behind."""

from enum import Enum

from services.etcd.etcd_errors import EtcdNoSpace, LeaseNotFound
from services.etcd.watch import NotListed
from services.values.errors import ConfigError, IsthmusError, ProtocolError


class Degraded(Enum):
    # The values are labels of metrics.
    LOADING = "index_loading"  # The router is listing etcd.
    AWAY = "etcd_away"
    FULL = "etcd_full"  # etcd's quota is used up; an operator must compact, defragment and disarm the alarm.
    REFUSED = "etcd_refuses"  # etcd refuses this user, or our request.
    BEHIND = "index_behind"  # Nothing fails, but the watch does not deliver what was written.
    NO_LEASE = "lease_lost"


def reason_of(error: IsthmusError) -> Degraded:
    match error:
        case NotListed():
            return Degraded.LOADING
        case EtcdNoSpace():
            return Degraded.FULL
        case LeaseNotFound():
            return Degraded.NO_LEASE
        case ConfigError() | ProtocolError():
            return Degraded.REFUSED
    return Degraded.AWAY
