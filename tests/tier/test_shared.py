"""These tests show what other ranks keep in their files, which they overwrite, lose and make anew."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from services.kv.tiers.records import Stored
from services.kv.tiers.tier_keys import ROOT
from services.tier import shared as shared_files
from services.tier import slab as slabs
from services.tier.copies import is_whole
from services.tier.shared import SharedFiles, SlotGone, name_of
from services.tier.slab import FileCalls, SlabShape
from services.values.errors import ProtocolError

SHAPE = SlabShape(b"layout-1", 256, 6)
KEYS = [bytes([number]) * 16 for number in range(1, 9)]
ranks, keys, slots = st.sampled_from(["d.1", "d.2"]), st.sampled_from(KEYS), st.integers(0, 3)


class Neighbours(RuleBasedStateMachine):
    """The oracle: a dict of what each owner's slots hold, and of what they held at the last look."""

    @initialize()
    def begin(self):
        self.directory = TemporaryDirectory()
        self.path = Path(self.directory.name)
        self.slabs, self.held, self.writes = {}, {}, 0
        self.flipped = set()
        for rank in ("d.0", "d.1", "d.2"):
            self.open(rank)
        self.shared = SharedFiles(self.path / SHAPE.layout_id.hex(), "d.0", SHAPE, FileCalls())
        self.looked = {}

    def open(self, rank, num_slots=6):
        self.slabs[rank] = slabs.open_file(self.path, rank, SlabShape(b"layout-1", 256, num_slots))
        self.held[rank] = {}

    @rule(rank=ranks, slot=slots, key=keys)
    def store(self, rank, slot, key):
        self.writes += 1
        content = key + self.writes.to_bytes(4, "little") * 60
        record = Stored(slot, key, ROOT, 0, 0, self.writes)
        self.slabs[rank].write(slot, memoryview(content), record)
        self.held[rank][slot] = key
        self.flipped.discard((rank, slot))

    @rule(rank=ranks, slot=slots)
    def is_killed_while_it_stores(self, rank, slot):
        slab = self.slabs[rank]
        slab._pwrite(bytes(64), slabs._record_at(slot))
        slab._pwrite(os.urandom(100), slab._at(slot))
        self.held[rank].pop(slot, None)

    @rule(rank=ranks, slot=slots)
    def flip(self, rank, slot):
        slab = self.slabs[rank]
        slab._pwrite(bytes([os.pread(slab._fd, 1, slab._at(slot) + 50)[0] ^ 1]), slab._at(slot) + 50)
        self.flipped ^= {(rank, slot)}

    @rule(rank=ranks, num_slots=st.integers(4, 8))
    def begin_anew(self, rank, num_slots):
        self.slabs[rank].close()
        shutil.rmtree(self.path / SHAPE.layout_id.hex() / rank)
        self.flipped = {each for each in self.flipped if each[0] != rank}
        self.open(rank, num_slots)

    @rule(rank=ranks, num_slots=st.integers(4, 8))
    def live_again(self, rank, num_slots):
        same = self.slabs[rank].shape.num_slots == num_slots
        self.slabs[rank].close()
        held, self.flipped = self.held[rank], {each for each in self.flipped if each[0] != rank or same}
        self.open(rank, num_slots)
        self.held[rank] = held if same else {}

    @rule()
    def look(self):
        self.shared.look()
        self.looked = {key for held in self.held.values() for key in held.values()}
        for key in KEYS:
            seen = self.shared.find(key)
            assert key not in self.looked or seen is not None
            if seen is None:
                continue
            places = {(rank, slot) for rank in self.held for slot, k in self.held[rank].items() if k == key}
            assert self.read(key, seen) or places & self.flipped, "nothing has happened since"

    @rule(key=keys)
    def read_at_any_time(self, key):
        if (seen := self.shared.find(key)) is not None:
            self.read(key, seen)

    def read(self, key, seen):
        """Tell whether it came whole; then it is the key's, whatever has happened since the look."""
        buffer = memoryview(bytearray(256))
        try:
            self.shared.read(seen.slot, buffer)
        except (SlotGone, OSError):
            return False
        if not is_whole(buffer, seen.digest):
            return False
        assert bytes(buffer[:16]) == key
        return True

    def teardown(self):
        if not hasattr(self, "directory"):
            return
        self.shared.close()
        for slab in self.slabs.values():
            slab.close()
        self.directory.cleanup()


TestNeighbours = Neighbours.TestCase
TestNeighbours.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_other_users_files_and_other_formats_are_left_alone(tmp_path, caplog, subtests):
    directory = tmp_path / SHAPE.layout_id.hex()
    shared = SharedFiles(directory, "d.0", SHAPE, FileCalls())
    record = Stored(0, KEYS[0], ROOT, 0, 0, 1)
    for name in ("d.1", "d.2", "d.3"):
        slab = slabs.open_file(tmp_path, name, SHAPE)
        slab.write(0, memoryview(bytes(256)), record)
        slab.close()
    (directory / "d.1" / "blocks").chmod(0o660)
    (directory / "d.2" / "blocks").write_bytes(b"?" * 5_000)
    os.truncate(directory / "d.3" / "blocks", 4_200)
    shared.look()
    shared.look()
    assert len(shared) == 0
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 1 and "d.3" in said[0], "a file that fails is said once"
    (directory / "d.1" / "blocks").chmod(0o600)
    shared.look()
    assert shared.find(KEYS[0]) is not None
    with pytest.raises(ProtocolError, match="another rank's"):
        shared.write(0, memoryview(bytes(256)), record)
    shared.close()
    with pytest.raises(SlotGone):
        shared.read(0, memoryview(bytearray(256)))


def test_a_look_takes_in_a_large_table_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_files, "_MOST_RECORDS", 2)
    owners = [slabs.open_file(tmp_path, rank, SHAPE) for rank in ("d.1", "d.2")]
    for number in range(5):
        record = Stored(number // 2, KEYS[number], ROOT, 0, 0, number)
        owners[number % 2].write(record.slot, memoryview(bytes(256)), record)
    shared = SharedFiles(tmp_path / SHAPE.layout_id.hex(), "d.0", SHAPE, FileCalls())
    known = []
    for _ in range(3):
        shared.look()
        known.append(len(shared))
    assert known == [2, 4, 5], "so many at a time, of all files together"
    shared.close()
    for slab in owners:
        slab.close()


def test_a_rank_knows_so_many_blocks_of_others_at_most(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shared_files, "_MOST_KNOWN", 4)
    owners = [slabs.open_file(tmp_path, rank, SHAPE) for rank in ("d.1", "d.2")]
    shared = SharedFiles(tmp_path / SHAPE.layout_id.hex(), "d.0", SHAPE, FileCalls())

    def store(number):
        record = Stored(number // 2, KEYS[number], ROOT, 0, 0, number)
        owners[number % 2].write(record.slot, memoryview(bytes(256)), record)

    for number in range(7):
        store(number)
    shared.look()
    shared.look()
    assert len(shared) == 4
    assert caplog.text.count("kv_tier_shared_full") == 1
    left = next(number for number in range(7) if shared.find(KEYS[number]) is None)
    known = next(number for number in range(7) if shared.find(KEYS[number]) is not None)
    owners[known % 2]._pwrite(bytes(64), slabs._record_at(known // 2))
    shared.look()
    store(left)
    owners[left % 2].write(
        left // 2, memoryview(bytes([1]) * 256), Stored(left // 2, KEYS[left], ROOT, 0, 0, 9)
    )
    shared.look()
    assert len(shared) == 4 and shared.find(KEYS[left]) is not None, "where one has gone another has room"
    for slab in owners:
        slab.close()
    shared.close()


def test_a_block_that_two_files_have_is_found_while_one_has_it(tmp_path):
    rank_slabs = {rank: slabs.open_file(tmp_path, rank, SHAPE) for rank in ("d.0", "d.1", "d.2")}
    shared = SharedFiles(tmp_path / SHAPE.layout_id.hex(), "d.0", SHAPE, FileCalls())
    key = KEYS[0]

    def store(rank, slot, what):
        rank_slabs[rank].write(slot, memoryview(what * 16), Stored(slot, what, ROOT, 0, 0, 1))
        shared.look()

    store("d.1", 0, key)
    store("d.2", 1, key)
    shared.forget(key, 10_000)
    assert shared.find(key) is not None, "it is another slot that has changed"
    shared.forget(key, (came_changed := shared.find(key)).slot)
    assert shared.find(key) is None
    shared.look()
    assert shared.find(key).slot != came_changed.slot, "the other one has it, too"
    store("d.2", 1, KEYS[3])
    store("d.2", 1, key)
    store("d.2", 1, KEYS[1])
    assert shared.find(key) is not None, "the first one has it yet"
    store("d.1", 0, KEYS[2])
    assert shared.find(key) is None
    for slab in rank_slabs.values():
        slab.close()
    shared.close()


def test_a_directory_has_one_name_wherever_it_is_mounted(subtests, tmp_path, monkeypatch):
    one, other = tmp_path / "one", tmp_path / "other"
    for directory in (one, other):
        directory.mkdir()
    (tmp_path / "mounted").symlink_to(one)
    with subtests.test("whoever asks"):
        assert name_of(one) == name_of(tmp_path / "mounted") != name_of(other)
        assert [path.name for path in one.iterdir()] == ["name"]
    with subtests.test("and also if two choose at once"):
        link, other_path = os.link, other / "name"
        other_path.unlink()

        def late(own, path):
            if not other_path.exists():
                other_path.write_text("fedcba9876543210")
                other_path.chmod(0o600)
            link(own, path)

        monkeypatch.setattr(os, "link", late)
        assert name_of(other) == "fedcba9876543210"
        assert [path.name for path in other.iterdir()] == ["name"]
    for what, spoil in [
        ("others may have written it", lambda path: path.chmod(0o622)),
        ("it is no name", lambda path: path.write_text("../../etc")),
        ("it is a link", lambda path: (path.unlink(), path.symlink_to("/etc/hostname"))),
    ]:
        with subtests.test("a name that cannot be trusted is none", what=what), pytest.raises(OSError):
            spoil(other / "name")
            name_of(other)
