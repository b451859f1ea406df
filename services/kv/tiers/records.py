"""A tier's table has a record for each slot, which a later process reads."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from services.kv.tiers.tier_keys import ROOT


class SlotKind(IntEnum):
    BLOCK = 0
    PART = 1  # It is a part of a checkpoint, and more parts follow.
    END = 2  # It is a checkpoint's last part.


@dataclass(frozen=True, slots=True)
class Stored:
    slot: int
    key: bytes
    parent_key: bytes
    block_hash: int
    digest: int
    sequence: int
    kind: SlotKind = SlotKind.BLOCK
    with_draft: bool = False


class LateTier(NamedTuple):
    tier: int
    free: list[int]
    stored: list[tuple[int, Stored]]  # They are in the order of `sequence`, each with the tier.

    @classmethod
    def of(cls, tier: int, num_slots: int, stored: Sequence[Stored]) -> "LateTier":
        """Take a second for half a million records. So it is not for the thread that computes steps, which
        numpy does not hold up while it sorts."""
        used = {each.slot for each in stored}
        free = [slot for slot in reversed(range(num_slots)) if slot not in used]
        order = np.argsort([each.sequence for each in stored], kind="stable").tolist()
        return cls(tier, free, [(tier, stored[place]) for place in order])


def unplaced_path(
    key: bytes, newest: Mapping[bytes, tuple[Stored, int]], placed: Container[bytes]
) -> list[tuple[Stored, int]]:
    """Return the records down to `key` that have no place yet, ancestors first; none if one is missing."""
    path: list[tuple[Stored, int]] = []
    while key != ROOT and key not in placed:
        if key not in newest or len(path) > len(newest):  # Only a forged table has a circle.
            return []
        path.append(newest[key])
        key = newest[key][0].parent_key
    return path[::-1]
