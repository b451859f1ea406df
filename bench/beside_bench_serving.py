"""`isthmus bench` and sglang.bench_serving in turn, on one cluster under the same load: do their figures
agree?

    python -m bench.beside_bench_serving --sglang-python=.venv-sglang/bin/python --rounds=5

The fake engine takes the same time for the same work, so what differs between rounds is the machine's doing,
and what differs between tools is theirs. bench_serving needs what `make setup-sglang test-clients` installs.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, table, write_json
from services.cli.local.local_cluster import LocalCluster, Shape
from services.cli.model.make_model import make_model

ROOT = Path(__file__).parents[1]
FIGURES = (
    "request_throughput",
    "input_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p90_ttft_ms",
    "mean_itl_ms",
    "median_itl_ms",
    "p90_itl_ms",
    "mean_tpot_ms",
    "mean_e2e_latency_ms",
    "p90_e2e_latency_ms",
    "concurrency",
)


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop, or an open one where there is a rate."""

    num_prompts: int
    input_len: int
    output_len: int
    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        loop = f"{self.rate:g} requests/s" if self.rate else f"{self.concurrency} at a time"
        return f"{self.num_prompts} x {self.input_len} + {self.output_len} tokens, {loop}"


LOADS = {"closed": Load(120, 256, 64, concurrency=8), "open": Load(60, 256, 64, rate=4.0)}


@dataclass(frozen=True, slots=True)
class Tools:
    cluster: LocalCluster
    model: Path
    sglang_python: Path
    sglang_packages: Path

    async def ours(self, load: Load, seed: int, out: Path, http: bool) -> Mapping[str, float]:
        url = f"http://127.0.0.1:{self.cluster.http_ports[0]}"
        where = f"--http={url}" if http else f"--router={self.cluster.router_endpoint()}"
        flags = [
            f"--num-prompts={load.num_prompts}",
            f"--input-len={load.input_len}",
            f"--output-len={load.output_len}",
        ]
        flags += [f"--rate={load.rate}"] if load.rate else [f"--concurrency={load.concurrency}"]
        await _run(
            [sys.executable, "-m", "services.cli", "bench", where, *flags, f"--seed={seed}", f"--json={out}"]
        )
        return _figures(json.loads(out.read_text()))

    async def theirs(self, load: Load, seed: int, out: Path, backend: str) -> Mapping[str, float]:
        flags = [f"--backend={backend}", f"--base-url=http://127.0.0.1:{self.cluster.http_ports[0]}"]
        flags += [f"--model={self.model}", "--dataset-name=random-ids", "--random-range-ratio=1"]
        flags += [
            f"--num-prompts={load.num_prompts}",
            f"--random-input-len={load.input_len}",
            f"--random-output-len={load.output_len}",
            f"--seed={seed}",
            f"--output-file={out}",
        ]
        is_native = backend == "sglang"
        flags += ["--tokenize-prompt"] if is_native else [f"--served-model-name={self.model.name}"]
        flags += [f"--request-rate={load.rate}"] if load.rate else [f"--max-concurrency={load.concurrency}"]
        path = f"{ROOT / 'services/engine/sglang/cpu_stand_ins'}:{self.sglang_packages}"
        environment = {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
        command = [str(self.sglang_python), "-m", "sglang.bench_serving", *flags, "--disable-tqdm"]
        await _run(command, environment)
        return _figures(json.loads(out.read_text().splitlines()[-1]))


def _figures(told: Mapping[str, float]) -> Mapping[str, float]:
    return {name: told[name] for name in FIGURES}


async def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Raises RuntimeError with what it said, when it fails."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **(environment or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{said.decode(errors='replace')[-3000:]}")


async def measure(tools: Tools, load: Load, rounds: int, folder: Path) -> list[Row]:
    told: dict[str, list[Mapping[str, float]]] = {}
    for number in range(rounds):
        seed, out = 1000 * load.num_prompts + int(10 * (load.rate or 0)) + number, folder / f"{number}"
        each = {
            "bench_serving, /generate": await tools.theirs(load, seed, out.with_suffix(".s"), "sglang"),
            "isthmus bench, HTTP": await tools.ours(load, seed, out.with_suffix(".h"), http=True),
            "bench_serving, completions": await tools.theirs(load, seed, out.with_suffix(".o"), "sglang-oai"),
            "isthmus bench, gRPC": await tools.ours(load, seed, out.with_suffix(".g"), http=False),
        }
        for name, figures in each.items():
            told.setdefault(name, []).append(figures)
        print(f"round {number + 1} of {rounds}: {load.name}", flush=True)
        for path in folder.iterdir():
            path.unlink()
    return [_row(figure, told) for figure in FIGURES]


def _row(figure: str, told: Mapping[str, Sequence[Mapping[str, float]]]) -> Row:
    row: Row = {"figure": figure}
    for name, rounds in told.items():
        values = sorted(each[figure] for each in rounds)
        row[name] = f"{median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"
    return row


async def _bench(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="isthmus-beside-") as name:
        folder = Path(name)
        make_model(folder / "model")
        shape = Shape(
            model=folder / "model",
            data_dir=folder / "etcd",
            rank_flags=(
                "--engine=fake",
                f"--fake-step-s={options.step_s}",
                "--fake-prompt-token-s=2e-5",
                "--kv-pages=8192",
            ),
        )
        (folder / "out").mkdir()
        async with LocalCluster(shape, lambda name, line: None) as cluster:
            tools = Tools(cluster, folder / "model", options.sglang_python, options.sglang_packages)
            rows: list[Row] = []
            for load in (LOADS[name] for name in options.loads):
                measured = await measure(tools, load, options.rounds, folder / "out")
                print(f"\n{load.name}: median of {options.rounds} runs (least to most)\n{table(measured)}\n")
                rows += [{"load": load.name, **row} for row in measured]
    if options.json is not None:
        write_json(options.json, "beside_bench_serving", {"rounds": options.rounds}, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sglang-python", type=Path, default=ROOT / ".venv-sglang/bin/python")
    parser.add_argument("--sglang-packages", type=Path, default=ROOT / ".cache/clients/bench-serving")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    end_as_by_ctrl_c()
    asyncio.run(_bench(options))


if __name__ == "__main__":
    main()
