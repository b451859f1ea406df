"""A block of KV below a rank's pool, as the books of its tiers know it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from services.kv.tiers.records import SlotKind
from services.kv.tiers.tier_keys import ROOT

_NEVER = -(1 << 62)


class Place(NamedTuple):
    tier: int
    slot: int


class SlotState(Enum):
    WRITING = "writing"
    HELD = "held"
    BAD = "bad"


@dataclass(slots=True, eq=False, repr=False)
class Block:
    key: bytes
    parent: "Block | None"
    block_hash: int  # The index knows the block by it, or the block at whose end the checkpoint lies.
    place: Place
    sequence: int  # The highest number has the newest record.
    kind: SlotKind = SlotKind.BLOCK
    with_draft: bool = False  # The draft model's KV of all its tokens is there, too.
    state: SlotState = SlotState.WRITING
    digest: int = 0  # This is the digest of the slot's bytes, from HELD on.
    busy: int = 0  # So many uses (reads, a write, a move) are under way.
    used: int = _NEVER  # The higher, the more recently; a use gives all blocks of its path the same number.
    depth: int = field(init=False)
    moves_to: Place | None = None
    children: "set[Block]" = field(default_factory=set)

    def __post_init__(self) -> None:
        self.depth = 1 if self.parent is None else self.parent.depth + 1

    @property
    def parent_key(self) -> bytes:
        return ROOT if self.parent is None else self.parent.key

    def __repr__(self) -> str:
        return f"Block({self.key.hex()[:8]} {self.state.value} at={self.place} busy={self.busy})"


def whole(block: Block, spared: Block | None) -> Block:
    """Return the block, or the first part of its checkpoint: without one part the others are of no use.

    A part that is spared stays, and so do those before it.
    """
    while block.kind is not SlotKind.BLOCK:
        parent = block.parent
        if parent is None or parent is spared or parent.kind is SlotKind.BLOCK:
            break
        block = parent
    return block


def gives_way(block: Block, to: Block) -> bool:
    """Return whether a block leaves its tier for one that comes from the tier before.

    Its children are as old as it is, so those in nearer tiers go with it.
    """
    return not _leads_to(block, to) and all(child.place.tier < block.place.tier for child in block.children)


def _leads_to(block: Block, end: Block) -> bool:
    at: Block | None = end
    while at is not None and at.depth > block.depth:
        at = at.parent
    return at is block


def is_idle(block: Block) -> bool:
    return block.state is SlotState.HELD and not block.busy
