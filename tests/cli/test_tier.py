"""`isthmus tier` lists, checks and removes what ranks have left in files."""

import errno
import os
from pathlib import Path

import pytest

from services.cli.tier import run
from services.kv.tiers.records import Stored
from services.kv.tiers.tier_keys import ROOT
from services.tier.slab import Slab, SlabShape, open_file

SHAPE = SlabShape.fitting(b"layout-1", 256, 1 << 20)


def test_a_slot_that_a_rank_writes_meanwhile_is_not_corrupt(tmp_path, capsys, monkeypatch):
    slab, read = open_file(tmp_path, "d.0", SHAPE), Slab.read

    def write(number, key):
        record = Stored(number, bytes([key]) * 16, ROOT, 0, 0, key)
        slab.write(number, memoryview(bytes([key]) * 256), record)

    def read_late(looking, slot, buffer):
        write(slot, 100 + slot)
        read(looking, slot, buffer)

    for number in range(3):
        write(number, number)
    monkeypatch.setattr(Slab, "read", read_late)
    assert run(["check", str(tmp_path)]) == 0
    assert "3 blocks, 0 differ" in capsys.readouterr().out
    slab.close()


def test_files_of_tiers_are_listed_checked_and_removed(tmp_path, capsys, subtests, monkeypatch):
    slab = open_file(tmp_path, "d.0", SHAPE)
    for number in range(3):
        record = Stored(number, bytes([number + 1]) * 16, ROOT, 0, 0, number)
        slab.write(number, memoryview(bytes([number]) * 256), record)
    layout = SHAPE.layout_id.hex()
    with subtests.test("what a rank has open is listed, and stays"):
        assert run(["ls", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert said.splitlines()[-1].split() == [layout, "d.0", "0", str(SHAPE.num_slots), "3", "in", "use"]
        assert run(["rm", str(tmp_path / layout)]) == 1
        assert (tmp_path / layout / "d.0" / "blocks").exists()
    slab.close()
    with subtests.test("a flipped byte is found"):
        assert run(["check", str(tmp_path)]) == 0
        with open(tmp_path / layout / "d.0" / "blocks", "r+b") as file:
            os.pwrite(file.fileno(), b"\xff", SHAPE.slots_at + 256 + 7)
        capsys.readouterr()
        assert run(["check", str(tmp_path)]) == 1
        assert capsys.readouterr().out.strip().endswith("3 blocks, 1 differ from their digests")
    with subtests.test("what nobody has open is removed"):
        assert run(["rm", str(tmp_path / layout)]) == 0
        assert not (tmp_path / layout / "d.0").exists()
        assert run(["rm", str(tmp_path)]) == 1
    with subtests.test("a file of another format is told apart"):
        (tmp_path / layout / "other").mkdir()
        (tmp_path / layout / "other" / "blocks").write_bytes(b"?" * 100)
        capsys.readouterr()
        assert run(["ls", str(tmp_path)]) == 0
        assert "of another format" in capsys.readouterr().out
    with subtests.test("what was never a tier's stays, whatever its name"):
        mine = tmp_path / "home" / "database"
        mine.mkdir(parents=True)
        for path in (mine / "blocks", mine / "thesis", tmp_path / layout / "other" / "thesis"):
            path.write_text("mine")
        (tmp_path / layout / "linked").symlink_to(mine)
        for directory in (tmp_path / "home", tmp_path / layout, tmp_path):
            assert run(["rm", str(directory)]) == 1
        assert [path.name for path in sorted(mine.iterdir())] == ["blocks", "thesis"]
        assert (tmp_path / layout / "other" / "blocks").exists()
    with subtests.test("what cannot be read is said in a sentence"):
        open_file(tmp_path, "cut", SHAPE).close()
        os.truncate(tmp_path / layout / "cut" / "blocks", 5000)
        capsys.readouterr()
        open_file(tmp_path, "whole", SHAPE).close()
        assert run(["check", str(tmp_path)]) == 1
        said = capsys.readouterr()
        assert f"{tmp_path / layout / 'cut' / 'blocks'} ends at byte" in said.err
        assert "whole/blocks: 0 blocks, 0 differ" in said.out  # The others are checked all the same.
    with subtests.test("what cannot be removed keeps nothing else from it"), monkeypatch.context() as patched:
        unlink = Path.unlink

        def fails(path):
            if path.parent.name == "cut":
                raise OSError(errno.EROFS, "Read-only file system")
            unlink(path)

        patched.setattr(Path, "unlink", fails)
        assert run(["rm", str(tmp_path / layout)]) == 1
        said = capsys.readouterr()
        assert "cut/blocks: Read-only" in said.err and "whole/blocks" in said.out
    with subtests.test("what fails is listed with the rest, and so is what found no room"):
        os.truncate(tmp_path / layout / "other" / "blocks", 0)
        assert run(["ls", str(tmp_path)]) == 0
        notes = dict(line.split(maxsplit=5)[1::4] for line in capsys.readouterr().out.splitlines()[1:])
        assert notes["cut"].startswith("fails: ") and notes["cut"].endswith("ends at byte 5000")
        assert notes["other"] == "empty: its rank found no room"
    with subtests.test("nonsense is refused"), pytest.raises(SystemExit):
        run(["look", str(tmp_path)])
