"""What has changed from one picture of the ranks to the next. Pure."""

from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_State = TypeVar("_State")


class Changes(NamedTuple, Generic[_State]):
    changed: list[_State]  # as they are now, newcomers too, in the order of now
    gone: list[_State]  # as they were

    @classmethod
    def between(cls, before: Mapping[_Key, _State], after: Mapping[_Key, _State]) -> "Changes[_State]":
        changed = [state for key, state in after.items() if key not in before or before[key] != state]
        return cls(changed, [state for key, state in before.items() if key not in after])
