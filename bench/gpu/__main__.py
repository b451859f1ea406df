"""This command tells on a fresh GPU host, without a network, what runs on CUDA, whether it is right and how
fast it is.

    make gpu WHEELS=DIR [JSON=FILE]          DIR: filled by `make gpu-wheels` where there is a network

    look       Python, torch, the GPU; which packages are missing, or in a version that will not do
    install    those, from DIR, into a folder that goes away again: nothing of the host is changed
    parts      one process each (bench/gpu/parts.py). Each says how it ended when it ends; what fails or takes
               too long stops no other. Tests run several at a time, as they mostly compile, and are cut off
               where benchmarks would lack time. A model of a billion parameters is made beside them
    summary    tables, the shortest last, and --json FILE: all figures; the exit code is 1 if a part failed
               or was not reached

`--device cpu` is a rehearsal without a GPU: the same parts, tiny.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from bench.gpu import host, wheels
from bench.gpu.outcomes import AGAIN, CONTINUES, TABLES_FOLLOW, headlines, tables_of
from bench.gpu.parts import ROOT, Part, model_command, parts
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, table

# Of all parts together: with what is installed it is less than eight minutes on a GPU.
LIMIT_S = {"cuda": 450.0, "cpu": 3600.0}
TESTS_SHARE = 0.4  # of that, where benchmarks follow
TOGETHER = {"cuda": 6, "cpu": 1}  # tests: a GPU's host has cores for their compilers
TAIL_LINES = 25
MOST_STARTS = 5
PASSED, FAILED, TOO_LONG, NOT_REACHED = "passed", "FAILED", "TOO LONG", "NOT REACHED"

_FACTS = """
import json, platform, torch
facts = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    facts |= {"gpu": properties.name, "gpu_gib": round(properties.total_memory / 2**30, 1),
              "capability": f"{properties.major}.{properties.minor}",
              "processors": properties.multi_processor_count}
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class Ended:
    part: str
    outcome: str
    took_s: float
    output: str

    def row(self) -> Row:
        lines = self.output.partition(TABLES_FOLLOW)[0].strip().splitlines()
        return {
            "part": self.part,
            "outcome": self.outcome,
            "seconds": round(self.took_s, 1),
            "last line": lines[-1][:90] if lines else "",
        }


def host_versions() -> dict[str, Version]:
    found: dict[str, Version] = {}
    for distribution in distributions():
        if distribution.name:
            found.setdefault(canonicalize_name(distribution.name), Version(distribution.version))
    return found


def install(folder: Path | None, target: Path, *, incomplete: bool = False) -> list[str]:
    """Install what is missing from `folder` into `target` and return what was taken.

    Raises SystemExit, with a sentence, where something is missing all the same; if that is `incomplete`, only
    says so.
    """
    ranges = host.ranges_of((ROOT / "pyproject.toml").read_text())
    has = host_versions()
    chosen = [] if folder is None else host.to_install(host.wheels_in(folder), has, ranges)
    has |= {wheel.name: wheel.version for wheel in chosen}
    names = [*wheels.needed_by_host(), *host.ITS_OWN]
    if missing := host.lacking(names, has, ranges):
        where = "no folder of wheels was named" if folder is None else f"not in {folder} either"
        said = f"missing here: {', '.join(missing)}; {where} (make gpu-wheels WHEELS=DIR fills one)"
        if not incomplete:
            sys.exit(said)
        print(said, flush=True)
    if chosen:
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile")
        paths = [str(wheel.path) for wheel in chosen]
        subprocess.run([*pip, "--disable-pip-version-check", "--target", str(target), *paths], check=True)
    return [f"{wheel.name} {wheel.version}" for wheel in chosen]


def environment(site: Path, device: str) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "tests"), str(site)]
    own = {"PYTHONUNBUFFERED": "1", "ISTHMUS_GPU_DEVICE": device, "OMP_NUM_THREADS": "4"}
    if device == "cpu":
        if find_spec("triton") is None:
            paths.append(str(ROOT / ".cache" / "triton"))  # of `make setup-triton`
        own |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(paths)}


def run_part(part: Part, env: Mapping[str, str], left_s: float) -> Ended:
    """Run the part, and again from where it was while it asks for that or is killed by a signal."""
    if left_s < 1:
        return Ended(part.name, NOT_REACHED, 0.0, "the time was up")
    began_s, deadline_s = time.monotonic(), time.monotonic() + min(part.limit_s, left_s)
    code, output = run_once(part, env, deadline_s - time.monotonic())
    for _ in range(MOST_STARTS - 1):
        if code is None or not (code == AGAIN or (code < 0 and part.figures is not None)):
            break
        code, more = run_once(part, {**env, CONTINUES: "1"}, deadline_s - time.monotonic())
        output += more
    outcome = TOO_LONG if code is None else PASSED if code == 0 else FAILED
    return Ended(part.name, outcome, time.monotonic() - began_s, output)


def run_once(part: Part, env: Mapping[str, str], limit_s: float) -> tuple[int | None, str]:
    """Return the exit code, None where it took too long, and what it said.

    It runs in a process group of its own, of which nothing is left when this returns.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
        output.seek(0)
        return code, output.read()


def end_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_parts(
    chosen: Sequence[Part],
    env: Mapping[str, str],
    model: "subprocess.Popen[bytes]",
    limit_s: float,
    together: int = 1,
) -> list[Ended]:
    """Run tests, up to `together` at a time, then benchmarks, one after the other.

    Who needs the model waits for it.
    """
    deadline_s = time.monotonic() + limit_s
    tests = [part for part in chosen if part.is_test and not part.needs_model]
    for_benchmarks_s = (1 - TESTS_SHARE) * limit_s if len(tests) < len(chosen) else 0.0
    with ThreadPoolExecutor(together) as executor:
        ended = list(executor.map(lambda part: _run_and_say(part, env, deadline_s - for_benchmarks_s), tests))
    for part in chosen:
        if part in tests:
            continue
        left_s = deadline_s - time.monotonic()
        if part.needs_model and not was_made(model, left_s):
            ended.append(Ended(part.name, NOT_REACHED, 0.0, "its model could not be made"))
            say(ended[-1])
        else:
            ended.append(_run_and_say(part, env, deadline_s))
    return ended


def _run_and_say(part: Part, env: Mapping[str, str], deadline_s: float) -> Ended:
    ended = run_part(part, env, deadline_s - time.monotonic())
    say(ended)
    return ended


def was_made(model: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    try:
        return model.wait(max(0.0, timeout_s)) == 0
    except subprocess.TimeoutExpired:
        return False


def say(ended: Ended) -> None:
    """A failure with what led to it, else the last line; tables come last of all."""
    lines = ended.output.partition(TABLES_FOLLOW)[0].strip().splitlines()
    shown = "\n".join(lines[-(1 if ended.outcome is PASSED else TAIL_LINES) :])
    print(f"\n=== {ended.part}: {ended.outcome} in {ended.took_s:.1f} s\n{shown}", flush=True)


def facts() -> dict[str, object]:
    """Raises SystemExit where there is no torch."""
    done = subprocess.run([sys.executable, "-c", _FACTS], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"torch cannot be imported by {sys.executable}:\n{done.stderr.strip()}")
    found: dict[str, object] = json.loads(done.stdout)
    return found


def figures_of(folder: Path, chosen: Sequence[Part]) -> dict[str, object]:
    """Return those that were written, also by parts that did not come to their end."""
    named = {part.name: folder / part.figures for part in chosen if part.figures is not None}
    found: dict[str, object] = {}
    for name, path in named.items():
        with suppress(OSError, ValueError):
            found[name] = json.loads(path.read_text())
    return found


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.prog = "make gpu"
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what the host lacks")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal")
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts, by their names")
    parser.add_argument("--cells", nargs="+", default=(), help="of bench.gpu.steps and bench.gpu.pieces")
    parser.add_argument("--ways", nargs="+", default=(), help="of bench.gpu.steps")
    parser.add_argument(
        "--together", type=int, help=f"so many tests at a time ({TOGETHER['cuda']}); benchmarks alone"
    )
    parser.add_argument("--incomplete", action="store_true", help="go on where packages are missing")
    parser.add_argument("--limit-s", type=float, help=f"of all parts ({LIMIT_S['cuda']:.0f})")
    parser.add_argument("--figures", type=Path, help="each part writes its own here, as it goes")
    arguments = parser.parse_args(argv)
    if arguments.wheels is not None and not arguments.wheels.is_dir():
        parser.error(f"--wheels: {arguments.wheels} is no folder")
    names = [part.name for part in parts("cpu", Path(), Path())]
    if unknown := set(arguments.only or ()) - set(names):
        parser.error(f"--only: no part is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return arguments


def main() -> None:
    arguments = arguments_of()
    began_s = time.monotonic()
    found = facts()
    print("  ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    if arguments.device == "cuda" and "gpu" not in found:
        sys.exit("torch sees no CUDA device here (--device cpu is a rehearsal without one)")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-gpu-")))
        taken = install(arguments.wheels, folder / "site", incomplete=arguments.incomplete)
        print(f"installed for this run: {', '.join(taken) or 'nothing'}", flush=True)
        env = environment(folder / "site", arguments.device)
        figures_in = arguments.figures or folder
        figures_in.mkdir(parents=True, exist_ok=True)
        chosen = parts(arguments.device, folder / "model", figures_in, arguments.cells, arguments.ways)
        chosen = [part for part in chosen if not arguments.only or part.name in arguments.only]
        needs_model = any(part.needs_model for part in chosen)
        command = model_command(folder / "model", arguments.device) if needs_model else ("true",)
        model = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
        stack.callback(end_group, model)
        limit_s = arguments.limit_s or LIMIT_S[arguments.device]
        together = arguments.together or TOGETHER[arguments.device]
        ended = run_parts(chosen, env, model, limit_s, together)
        figures = figures_of(figures_in, chosen)
    rows = [one.row() for one in ended]
    summary = headlines(figures)
    if arguments.json is not None:
        report = {
            "benchmark": "gpu",
            "host": found,
            "installed": taken,
            "rows": rows,
            "summary": summary,
            "figures": figures,
            "failures": {one.part: one.output for one in ended if one.outcome is not PASSED},
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{tables_of(figures)}\n\n{table(rows)}")
    print(f"\n{table(summary)}" if summary else "", f"\nin all {time.monotonic() - began_s:.0f} s")
    sys.exit(any(one.outcome is not PASSED for one in ended))


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
