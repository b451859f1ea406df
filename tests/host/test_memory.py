"""What is left of memory."""

from services.host.memory import available_bytes


def machine(folder, available="MemTotal: 99 kB\nMemAvailable:  64 kB\n", limit=None, current=0, stat=""):
    (folder / "meminfo").write_text(available)
    if limit is not None:
        for name, text in (("max", limit), ("current", current), ("stat", stat)):
            (folder / f"memory.{name}").write_text(f"{text}\n")
    return available_bytes(folder / "meminfo", folder)


def test_the_machine_s(tmp_path):
    assert machine(tmp_path) == 64 << 10


def test_the_container_s_where_that_is_less(tmp_path):
    assert machine(tmp_path, limit="max") == 64 << 10
    stat = "anon 7\nactive_file 1000\ninactive_file 200"
    assert machine(tmp_path, limit=30_000, current=20_000, stat=stat) == 11_200
    assert machine(tmp_path, limit=1 << 40, stat=stat) == 64 << 10


def test_nobody_tells(tmp_path):
    assert available_bytes(tmp_path / "no", tmp_path / "no") is None
    assert machine(tmp_path, available="MemTotal: 99 kB\n") is None
