"""These tests show what is left of memory."""

import os

from services.host.memory import available_bytes, is_in_memory, total_bytes


def machine(folder, available="MemTotal: 99 kB\nMemAvailable:  64 kB\n", limit=None, current=0, stat=""):
    (folder / "meminfo").write_text(available)
    if limit is not None:
        for name, text in (("max", limit), ("current", current), ("stat", stat)):
            (folder / f"memory.{name}").write_text(f"{text}\n")
    return available_bytes(folder / "meminfo", folder, folder / "own")


def test_what_is_left(subtests, tmp_path_factory):
    with subtests.test("the machine s"):
        tmp_path = tmp_path_factory.mktemp("case")
        assert machine(tmp_path) == 64 << 10
    with subtests.test("the container s where that is less"):
        tmp_path = tmp_path_factory.mktemp("case")
        assert machine(tmp_path, limit="max") == 64 << 10
        stat = "anon 7\nactive_file 1000\ninactive_file 200"
        assert machine(tmp_path, limit=30_000, current=20_000, stat=stat) == 11_200
        assert machine(tmp_path, limit=1 << 40, stat=stat) == 64 << 10
    with subtests.test("nobody tells"):
        tmp_path = tmp_path_factory.mktemp("case")
        nowhere = (tmp_path / "no",) * 3
        assert available_bytes(*nowhere) is None and total_bytes(*nowhere) is None
        assert machine(tmp_path, available="MemTotal: 99 kB\n") is None
    # As of systemd's slices: the root has none, and neither has the innermost.
    with subtests.test("a limit may lie on the way to our own group"):
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "own").write_text("1:name=systemd:/x\n0::/slice/unit\n")
        slice = tmp_path / "slice"
        (slice / "unit").mkdir(parents=True)
        for name, text in (("max", "40000"), ("current", "10000"), ("stat", "")):
            (slice / f"memory.{name}").write_text(text)
        (slice / "unit" / "memory.max").write_text("max")
        assert machine(tmp_path) == 30_000
        assert total_bytes(tmp_path / "meminfo", tmp_path, tmp_path / "own") == 40_000
        assert total_bytes(tmp_path / "meminfo", tmp_path, tmp_path / "no") == 99 << 10
    # A container on a node of cgroup v1 sees its own group as the root, and has the node's path in
    # /proc/self/cgroup. No limit is a number there.
    with subtests.test("cgroup v1 has other files"):
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "own").write_text("9:name=systemd:/pod/c\n4:memory:/pod/c\n1:cpu:/pod/c\n0::/\n")
        group = tmp_path / "memory"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("50000\n")
        (group / "memory.usage_in_bytes").write_text("20000\n")
        (group / "memory.stat").write_text(
            "inactive_file 1\ntotal_active_file 1000\ntotal_inactive_file 200\n"
        )
        assert machine(tmp_path) == 31_200
        assert total_bytes(tmp_path / "meminfo", tmp_path, tmp_path / "own") == 50_000
        (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
        assert machine(tmp_path) == 64 << 10
        assert total_bytes(tmp_path / "meminfo", tmp_path, tmp_path / "own") == 99 << 10


def test_where_a_file_system_keeps_its_files(tmp_path):
    mounts, path = tmp_path / "mountinfo", tmp_path / "file"
    path.touch()
    device = path.stat().st_dev
    own = f"{os.major(device)}:{os.minor(device)}"
    another = "3 1 0:999 / /dev/shm rw - tmpfs tmpfs rw"
    with path.open() as file:
        for told, found in [
            (
                f"{another}\n4 1 {own} / /tmp rw shared:1 - ext4 /dev/sda rw\n",
                False,
            ),
            (f"4 1 {own} / /tmp rw,relatime shared:1 master:2 - tmpfs none rw,size=8m\n", True),
            (f"4 1 {own} / /tmp rw - ramfs none rw\n", True),
            ("", False),
        ]:
            mounts.write_text(told)
            assert is_in_memory(file.fileno(), mounts) is found
        assert not is_in_memory(file.fileno(), tmp_path / "none")
