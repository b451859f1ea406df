"""A router's index, or a rank's publishing, is behind for one of these reasons."""

from enum import Enum

from services.etcd.etcd_errors import EtcdNoSpace, LeaseNotFound
from services.etcd.watch import NotListed
from services.values.errors import ConfigError, IsthmusError, ProtocolError


class Degraded(Enum):
    """The value is the label of the metrics."""

    LOADING = "index_loading"  # etcd is being listed.
    AWAY = "etcd_away"
    FULL = "etcd_full"  # Its quota is used up; an operator must compact, defragment and disarm the alarm.
    REFUSED = "etcd_refuses"  # It refuses this user, or what we ask.
    BEHIND = "index_behind"  # Nothing fails, and yet the watch does not show what was written.
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
