"""The records of a rank's lives as stories: what etcd shows a router, and what the router makes of it.

    head LIFE.EPOCH chunks=N base=SEQ [at=REVISION]      names the snapshot that counts
    chunk LIFE.EPOCH NUMBER BLOCK ...                    of that snapshot
    delta LIFE.EPOCH SEQ [+BLOCK ...] [-BLOCK ...]       what has changed since
    registers LIFE                                       the rank's registration names its generation
    read                                                 everything up to some revision has been offered
    from-the-start                                       the records are read again, from the first one on

Revisions count up, unless `at` says otherwise. Blocks are letters; x* is told as resumable, beside x as held.
"""

import pytest

from plugins.transcripts import stem, transcripts_beside
from services.index.read.rank_history import RankHistory, Verdict
from services.index.records import PrefixDelta, PrefixHead, PrefixSnapshot, hashes_of
from services.values.rank import Generation


class Router:
    """What a router knows of one rank's blocks."""

    def __init__(self):
        self.history, self.blocks, self.resumable, self.revision = RankHistory(), set(), set(), 0

    def perform(self, command):
        return getattr(self, f"do_{command.name.replace('-', '_')}")(command)

    def do_head(self, command):
        numbers = {name: int(value) for name, value in command.options.items()}
        revision = numbers.get("at", self.revision + 1)
        head = PrefixHead(*life_of(command), base_seq=numbers["base"], snapshot_chunks=numbers["chunks"])
        return self.offer(head, revision)

    def do_chunk(self, command):
        number, *blocks = command.words[1:]
        return self.offer(PrefixSnapshot(*life_of(command), int(number), held(blocks), resumable(blocks)))

    def do_delta(self, command):
        seq, *changes = command.words[1:]
        added = [change[1:] for change in changes if change[0] == "+"]
        removed = [change[1:] for change in changes if change[0] == "-"]
        told = [of(blocks) for of in (held, resumable) for blocks in (added, removed)]
        return self.offer(PrefixDelta(*life_of(command), int(seq), *told[:2], 0.0, *told[2:]))

    def do_registers(self, command):
        self.history.expect(Generation(int(command.words[0])))
        return ()

    def do_read(self, command):
        return ["a record is missing: read again"] if self.history.gap() else ["nothing is missing"]

    def do_from_the_start(self, command):
        self.history.restart()
        return ()

    def offer(self, record, revision=None):
        self.revision = max(self.revision + 1, revision or 0)
        step = self.history.offer(record, revision or self.revision)
        if step.verdict is not Verdict.APPLY:
            return [step.verdict.value]
        if step.snapshot is not None:
            self.blocks = {block for chunk in step.snapshot for block in chunk.hashes}
            self.resumable = {block for chunk in step.snapshot for block in chunk.resumable}
        for delta in step.deltas:
            self.blocks = (self.blocks | set(delta.added)) - set(delta.removed)
            self.resumable = (self.resumable | set(delta.resumable_added)) - set(delta.resumable_removed)
        what = ["the snapshot"] * (step.snapshot is not None) + [
            f"delta {delta.seq}" for delta in step.deltas
        ]
        shown = [chr(block) + "*" * (block in self.resumable) for block in sorted(self.blocks)]
        return [f"apply {', '.join(what)}", f"holds {' '.join(shown) or 'nothing'}"]


def life_of(command):
    generation, epoch = command.words[0].split(".")
    return Generation(int(generation)), int(epoch)


def held(blocks):
    return hashes_of(ord(block) for block in blocks if not block.endswith("*"))


def resumable(blocks):
    return hashes_of(ord(block[0]) for block in blocks if block.endswith("*"))


@pytest.mark.parametrize("path", transcripts_beside(__file__), ids=stem)
def test_lives_in_the_index(path, play):
    play(path, Router().perform)
