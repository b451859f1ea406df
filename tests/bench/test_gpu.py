"""The run on a GPU host: what is installed there, and that a part that fails or hangs stops no other."""

import json
import logging
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from bench.gpu import __main__ as gpu
from bench.gpu import wheels
from bench.gpu.cells import Cell, run_cells
from bench.gpu.host import ITS_OWN, Wheel, lacking, ranges_of, to_install
from bench.gpu.outcomes import CONTINUES, headlines, tables_of
from bench.gpu.parts import Part, parts

pytestmark = pytest.mark.long


ROOT = Path(gpu.__file__).parents[2]
RANGES = {"protobuf": SpecifierSet(">=6.33,<7"), "grpcio": SpecifierSet(">=1.81")}


def wheel(name, version):
    return Wheel(name, Version(version), Path(f"{name}.whl"))


_IMPORTED = """
import importlib, json, sys
from importlib.metadata import packages_distributions
for name in sys.argv[1:]:
    importlib.import_module(name)
of_module = packages_distributions()
print(json.dumps(sorted({own for name in sys.modules for own in of_module.get(name, ())})))
"""


def test_all_that_the_parts_import_of_our_dependencies_is_on_the_host_or_among_the_wheels():
    modules = [module_of(own) for own in parts("cuda", Path("model"), Path("figures"))]
    command = [sys.executable, "-c", _IMPORTED, *modules, "bench.gpu.model"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    imported = {canonicalize_name(name) for name in json.loads(done.stdout)}
    ours = imported & ranges_of((ROOT / "pyproject.toml").read_text()).keys()
    assert {"torch", "llguidance"} <= ours
    there = {canonicalize_name(name) for name in (*wheels.needed_by_host(), *ITS_OWN, "h11")}  # the hub's own
    assert not ours - there


def module_of(own):
    if own.figures is None:
        return f"gpu.{Path(own.command[-1]).stem}"
    name = own.command[2]
    return name if (ROOT / name.replace(".", "/")).with_suffix(".py").is_file() else f"{name}.__main__"


def test_packages_of_the_host(subtests, tmp_path):
    for has, installed in [
        ({}, ["grpcio", "pluggy", "protobuf"]),
        ({"grpcio": "1.85", "pluggy": "1.7", "protobuf": "6.33.6"}, []),
        ({"grpcio": "1.99", "pluggy": "2.0", "protobuf": "7.1"}, ["protobuf"]),  # too new for us
        ({"grpcio": "1.60", "pluggy": "1.0", "protobuf": "6.34"}, ["grpcio", "pluggy"]),
    ]:
        with subtests.test("what the host has and will do is not replaced", has=has, installed=installed):
            offered = [wheel("grpcio", "1.85"), wheel("pluggy", "1.7"), wheel("protobuf", "6.33.6")]
            versions = {name: Version(version) for name, version in has.items()}
            assert [own.name for own in to_install(offered, versions, RANGES)] == installed
    with subtests.test("what is lacking is named with the range it must lie in"):
        has = {"protobuf": Version("7.1"), "numba": Version("0.68")}
        assert lacking(["protobuf", "numba", "nixl"], has, RANGES) == ["protobuf<7,>=6.33 (is 7.1)", "nixl"]
    with subtests.test("torch of 2 11 is enough"):
        torch = ranges_of((ROOT / "pyproject.toml").read_text())["torch"]
        assert torch.contains("2.11.0+cu130")
        assert not torch.contains("2.10.0")
    with subtests.test("every wheel for the host has a version that is pinned"):
        pins = [wheels.pinned(name) for name in [*wheels.needed_by_host(), wheels.nixl_build(13)]]
        assert all(pin.split("==")[1] for pin in pins)
    with subtests.test("a slimmed wheel lacks the unwanted folder and its records"):
        path = tmp_path / "nixl_cu13-1.0-py3-none-any.whl"
        record = "nixl_cu13/__init__.py,sha256=x,6\nnixl_ep_cu13/big.so,sha256=y,999\n"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("nixl_cu13/__init__.py", "x = 1\n")
            archive.writestr("nixl_ep_cu13/big.so", "0" * 999)
            archive.writestr("nixl_cu13-1.0.dist-info/RECORD", record)
        wheels.slim(path, "nixl_ep_")
        with zipfile.ZipFile(path) as archive:
            assert archive.namelist() == ["nixl_cu13/__init__.py", "nixl_cu13-1.0.dist-info/RECORD"]
            assert b"nixl_ep" not in archive.read("nixl_cu13-1.0.dist-info/RECORD")
        assert list(tmp_path.iterdir()) == [path]


def part(name, code, limit_s=60.0, needs_model=False):
    return Part(name, (sys.executable, "-c", code), limit_s, needs_model)


def process(code):
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def test_cells(subtests, tmp_path, capsys, monkeypatch):
    path, cpu = tmp_path / "cells.json", torch.device("cpu")

    def fails():
        logging.getLogger("services.engine").warning("graph_refused rows=%d", 8)
        raise ValueError("no such kernel")

    cells = [
        Cell("bad", "first", fails),
        Cell("good", "first", lambda: [{"x": 1}]),
        Cell("more", "first", lambda: [{"x": 2}]),
    ]
    with subtests.test("a cell that fails stops no other, and says why"):
        with pytest.raises(SystemExit) as ended:
            run_cells("cells", cells, path, cpu, {})
        assert ended.value.code == 1
        written = json.loads(path.read_text())
        assert written["tables"] == {"first": [{"x": 1}, {"x": 2}]}
        assert written["outcomes"]["good"] == "passed"
        assert "ValueError: no such kernel" in written["outcomes"]["bad"]
        assert written["log"] == ["WARNING graph_refused rows=8"]
        assert "bad FAILED: ValueError: no such kernel" in tables_of({"part": written})
    with subtests.test("who is started again goes on behind the cell in which it ended"):
        written["outcomes"] = {"bad": "began"}
        path.write_text(json.dumps(written))
        monkeypatch.setenv(CONTINUES, "1")
        with pytest.raises(SystemExit) as ended:
            run_cells("cells", [replace(cells[0], measure=lambda: 1 / 0), *cells[1:]], path, cpu, {})
        written = json.loads(path.read_text())
        assert written["outcomes"] == {"bad": "the process ended in it", "good": "passed", "more": "passed"}
    with subtests.test("nothing was measured"):
        assert headlines({}) == []
        assert tables_of({"part": {"tables": {}}}) == ""


def test_parts(subtests, capsys):
    with subtests.test("a part that fails or hangs stops no other"):
        chosen = [
            part("fails", "print('why'); raise SystemExit(3)"),
            part("hangs", "import time; print('before', flush=True); time.sleep(600)", limit_s=1.0),
            part("passes", "print('fine')", needs_model=True),
        ]
        ended = gpu.run_parts(chosen, {}, process("pass"), limit_s=120)
        assert [one.outcome for one in ended] == [gpu.FAILED, gpu.TOO_LONG, gpu.PASSED]
        assert [one.output.strip() for one in ended] == ["why", "before", "fine"]
        said = capsys.readouterr().out
        assert said.index("fails: FAILED") < said.index("hangs: TOO LONG") < said.index("passes: passed")
    with subtests.test("a benchmark that asks for it, or is killed, is started again and goes on"):
        code = "import os; os.environ.get('ISTHMUS_GPU_CONTINUES') or os._exit(75); print('went on')"
        again = Part("again", (sys.executable, "-c", code), 60.0, figures="again.json")
        killed = Part("killed", (sys.executable, "-c", code.replace("os._exit(75)", "os.abort()")), 60.0)
        [ended] = gpu.run_parts([again], {}, process("pass"), limit_s=120)
        assert (ended.outcome, ended.output.strip()) == (gpu.PASSED, "went on")
        [ended] = gpu.run_parts([killed], {}, process("pass"), limit_s=120)
        assert ended.outcome == gpu.FAILED, "a test that is killed is not"
    with subtests.test("what needs a model that could not be made is not reached"):
        [ended] = gpu.run_parts(
            [part("bench", "pass", needs_model=True)], {}, process("raise SystemExit(1)"), 60
        )
        assert (ended.outcome, ended.output) == (gpu.NOT_REACHED, "its model could not be made")
    with subtests.test("what the time is up for is not reached"):
        [ended] = gpu.run_parts([part("late", "pass")], {}, process("pass"), limit_s=0)
        assert ended.outcome == gpu.NOT_REACHED
    with subtests.test("tests leave benchmarks their time, and have all of it alone"):
        test, bench = (
            part("tests", "import time; time.sleep(600)"),
            Part("bench", ("true",), 60.0, figures="x"),
        )
        for chosen, least_s, most_s in [([test, bench], 1.5, 4.0), ([test], 4.5, 60.0)]:
            ended = gpu.run_parts(chosen, {}, process("pass"), limit_s=5.0)
            assert ended[0].outcome == gpu.TOO_LONG and least_s <= ended[0].took_s < most_s
            assert [one.outcome for one in ended[1:]] == [gpu.PASSED] * (len(chosen) - 1)
    with subtests.test("the benchmarks that matter most fit into what tests leave of eight minutes"):
        benches = [own for own in parts("cuda", Path(), Path()) if not own.is_test]
        assert gpu.LIMIT_S["cuda"] < 8 * 60
        left_s = (1 - gpu.TESTS_SHARE) * gpu.LIMIT_S["cuda"]
        assert [own.name for own in benches][:3] == [
            "bench.gpu.steps",
            "bench.decode_cache",
            "bench.gpu.pieces",
        ]
        assert sum(own.limit_s for own in benches[:3]) <= left_s
    for device in ["cpu", "cuda"]:
        with subtests.test("every part has its file", device=device):
            for own in parts(device, Path("model"), Path("figures")):
                if own.figures is None:
                    assert (ROOT / own.command[-1]).is_file(), own
                else:
                    place = ROOT / own.command[2].replace(".", "/")
                    assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), own
    with subtests.test("every test for a GPU has its part"):
        files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
        assert files == {Path(own.command[-1]).name for own in parts("cuda", Path(), Path()) if own.is_test}
    with subtests.test("nonsense is refused by name"):
        for argv in (["--only", "kernel"], ["--wheels", "/nowhere"]):
            with pytest.raises(SystemExit):
                gpu.arguments_of(argv)
        said = capsys.readouterr().err
        assert "no part is called kernel; there are kernels" in said
        assert "/nowhere is no folder" in said
