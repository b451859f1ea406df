"""The parts of a run on a GPU host: each a command of its own, so that one that fails stops no other."""

import sys
from dataclasses import dataclass
from pathlib import Path

# 18 layers of 59 million parameters each, and what is left: 1.06 billion.
BILLION = ("--layers=18", "--hidden=2560", "--heads=20", "--kv-heads=10")
# For a rehearsal on a CPU.
TINY = ("--layers=2", "--hidden=64", "--heads=4", "--kv-heads=2")
MODEL_CONTEXT_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Part:
    """`figures` is the name of the JSON file that it writes, if it is a benchmark."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    needs_model: bool = False
    figures: str | None = None


def model_command(model: Path, rehearsal: bool) -> tuple[str, ...]:
    """Writes the checkpoint that the benchmarks run."""
    size = TINY if rehearsal else BILLION
    context = f"--max-context-tokens={MODEL_CONTEXT_TOKENS}"
    return (sys.executable, "-m", "bench.checkpoint", str(model), *size, context)


def parts(device: str, model: Path, figures: Path) -> list[Part]:
    """All parts in their order: what must be right first, then what it costs.

    `device` cpu is a rehearsal: the same parts, so small that they say nothing of speed.
    """
    rehearsal = device == "cpu"
    return [
        _tests("kernels", 200),
        _tests("transport", 60),
        _tests("exactness", 120),
        _tests("half", 90),
        _tests("families", 150),
        _tests("pair", 90),
        _bench("transfer", device, figures, 90, *(_TRANSFER_QUICK if rehearsal else ("--rounds=5",))),
        _bench("engine", device, figures, 150, *_engine(rehearsal), model=model),
        _bench("decode_cache", device, figures, 200, *_decode_cache(rehearsal), model=model),
    ]


_TRANSFER_QUICK = ("--total-mib=64", "--pool-mib=192", "--rounds=1")


def _engine(rehearsal: bool) -> tuple[str, ...]:
    if rehearsal:
        return ("--batches", "1", "--contexts", "64", "--prompts", "64", "--rounds=1", "--num-threads=1")
    cells = ("--batches", "1", "16", "64", "--contexts", "2048", "--prompts", "2048", "8192")
    return (*cells, "--chunk-size=2048", "--rounds=9")  # chunks as in the chart's samples for GPUs


def _decode_cache(rehearsal: bool) -> tuple[str, ...]:
    return ("--workload=turns", "--rounds=1", "--quick") if rehearsal else ("--workload=shared", "--rounds=1")


def _tests(name: str, limit_s: float) -> Part:
    pytest = (sys.executable, "-m", "pytest", "-q", "-rfEs", "-m", "gpu", "-o", "faulthandler_timeout=45")
    return Part(name, (*pytest, f"tests/gpu/test_{name}.py"), limit_s)


def _bench(
    name: str, device: str, figures: Path, limit_s: float, *arguments: str, model: Path | None = None
) -> Part:
    json = figures / f"{name}.json"
    own = () if model is None else (f"--checkpoint={model}",)
    command = (
        sys.executable,
        "-m",
        f"bench.{name}",
        f"--device={device}",
        f"--json={json}",
        *own,
        *arguments,
    )
    return Part(f"bench.{name}", command, limit_s, model is not None, json.name)
