"""What has changed from one picture of the ranks to the next. Pure but for protobuf's messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from services.wire.isthmus.v1.generation_pb2 import RankStatus

RankName = tuple[str, int]  # worker and rank: a new life is a change
_SECONDS = ("staleness_s", "unregistered_s")  # they change by themselves
_SHARES = ("trust", "resume_trust")  # likewise


@dataclass(frozen=True, slots=True)
class Shown:
    """A rank's state; two are the same whose times differ by less than a second or so."""

    status: RankStatus = field(compare=False)
    rough: RankStatus

    @classmethod
    def of(cls, status: RankStatus) -> "Shown":
        rough = RankStatus()
        rough.CopyFrom(status)
        for name in _SECONDS:
            setattr(rough, name, int(getattr(status, name)))
        for name in _SHARES:
            if getattr(status, name):
                setattr(rough, name, round(getattr(status, name), 2))
        return cls(status, rough)


class Changes(NamedTuple):
    changed: list[RankStatus]  # as they are now, newcomers too, in the order of now
    gone: list[RankStatus]  # as they were

    @classmethod
    def between(cls, before: Mapping[RankName, Shown], after: Mapping[RankName, Shown]) -> "Changes":
        changed = [shown.status for name, shown in after.items() if before.get(name) != shown]
        return cls(changed, [shown.status for name, shown in before.items() if name not in after])
