"""A watcher's options are checked here."""

from dataclasses import dataclass

from services.router.callers import Caller
from services.values.errors import Forbidden, InvalidRequest
from services.values.request import MAX_ID_CHARS, is_id
from services.wire.isthmus.v1 import generation_pb2

_USUAL_INTERVAL_S = 1.0
_SHORTEST_S, _LONGEST_S = 0.1, 60.0


@dataclass(frozen=True, slots=True)
class WatchOptions:
    interval_s: float
    tenant: str | None  # None stands for everybody's requests.
    wants_candidates: bool = True

    def sees(self, tenant: str) -> bool:
        return self.tenant is None or self.tenant == tenant


def read_watch_options(request: generation_pb2.WatchClusterRequest, caller: Caller) -> WatchOptions:
    interval_s = request.interval_s or _USUAL_INTERVAL_S
    if not _SHORTEST_S <= interval_s <= _LONGEST_S:  # NaN is not, either.
        raise InvalidRequest(
            "interval_s", f"must be 0 or in [{_SHORTEST_S:g}, {_LONGEST_S:g}], got {request.interval_s:g}"
        )
    if not is_id(request.tenant):
        raise InvalidRequest("tenant", f"must be at most {MAX_ID_CHARS} printable characters")
    if not request.all_tenants:
        return WatchOptions(interval_s, caller.tenant_of(request.tenant), not request.no_candidates)
    if request.tenant:
        raise InvalidRequest("tenant", "must be empty where all_tenants is set")
    if not caller.is_operator:
        raise Forbidden("all_tenants needs an operator's API key")
    return WatchOptions(interval_s, None, not request.no_candidates)
