"""The parts of a run on a GPU host: each a command of its own, so that one that fails stops no other."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
# For a rehearsal on a CPU; the sizes for a GPU are those of bench.gpu.model: 1.06 billion parameters.
_TINY = ("--layers=2", "--hidden=64", "--heads=4", "--kv-heads=2")


@dataclass(frozen=True, slots=True)
class Part:
    """`figures` is the name of the JSON file that it writes, if it is a benchmark."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    needs_model: bool = False
    figures: str | None = None

    @property
    def is_test(self) -> bool:
        """Tell whether it may run beside others: nothing is timed."""
        return self.figures is None


def model_command(model: Path, device: str) -> tuple[str, ...]:
    """Writes the checkpoint that the benchmarks run."""
    size = _TINY if device == "cpu" else ()
    return (sys.executable, "-m", "bench.gpu.model", str(model), f"--device={device}", *size)


def parts(
    device: str, model: Path, figures: Path, cells: Sequence[str] = (), ways: Sequence[str] = ()
) -> list[Part]:
    """All parts in their order: what must be right first, then what it costs, and of that what matters most.

    `device` cpu is a rehearsal: the same parts, so small that they say nothing of speed. `cells` are those
    that steps and pieces measure, `ways` those of steps; none are all.
    """
    rehearsal = device == "cpu"
    chosen = ("--cells", *cells) if cells else ()
    of_steps = (*chosen, *(("--ways", *ways) if ways else ()))
    chosen_parts = [
        _tests("kernels", 200),
        _tests("prompts", 120),
        _tests("graphs", 150),
        _tests("fused", 120),
        _tests("sampling", 90),
        _tests("stored_weights", 90),
        _tests("transport", 60),
        _tests("tiers", 60),
        _tests("exactness", 120),
        _tests("half", 90),
        _tests("families", 150),
        _tests("pair", 90),
        _bench("gpu.steps", device, figures, 130, *(_STEPS_QUICK if rehearsal else ()), *of_steps),
        _bench("decode_cache", device, figures, 80, *_decode_cache(rehearsal), model=model),
        _bench("gpu.pieces", device, figures, 60, *chosen),
        _eager_cache(device, figures, model, rehearsal),
        _bench("transfer", device, figures, 60, *(_TRANSFER_QUICK if rehearsal else ("--rounds=5",))),
        _compiled(device, figures, rehearsal),
    ]
    return [replace(part, limit_s=_REHEARSAL_S) for part in chosen_parts] if rehearsal else chosen_parts


_REHEARSAL_S = 1200.0  # of each part, as an interpreter runs the kernels there
_TRANSFER_QUICK = ("--total-mib=64", "--pool-mib=192", "--rounds=1")
_STEPS_QUICK = (
    *("--batches", "1", "2", "--context=64", "--prompts", "64", "--rounds=3"),
    *("--page-size=16", "--chunk-size=64", "--num-threads=1"),
)


def _decode_cache(rehearsal: bool) -> tuple[str, ...]:
    # Chunks are as in the chart's samples for GPUs.
    own = ("--workload=turns", "--quick") if rehearsal else ("--workload=shared", "--chunk-size=2048")
    return (*own, "--rounds=1")


def _eager_cache(device: str, figures: Path, model: Path, rehearsal: bool) -> Part:
    """Return the part that runs the side with the cache, and no graphs: what graphs gain is told by both."""
    own = ("--sides", "on", "--graph-mib=0", *_decode_cache(rehearsal))
    return _bench("decode_cache", device, figures, 60, *own, model=model, of="decode_cache.eager")


def _compiled(device: str, figures: Path, rehearsal: bool) -> Part:
    """Return the part that tells what torch.compile would gain; it goes first where time is short."""
    own = _STEPS_QUICK if rehearsal else ("--batches", "1", "16")
    return _bench("gpu.steps", device, figures, 50, *own, "--cells", "compiled", of="gpu.compiled")


def _tests(name: str, limit_s: float) -> Part:
    pytest = (sys.executable, "-m", "pytest", "-q", "-rfEs", "-m", "gpu", "-o", "faulthandler_timeout=45")
    return Part(name, (*pytest, f"tests/gpu/test_{name}.py"), limit_s)


def _bench(
    name: str,
    device: str,
    figures: Path,
    limit_s: float,
    *arguments: str,
    model: Path | None = None,
    of: str | None = None,
) -> Part:
    """Return a part that runs the benchmark `name`; `of` names it where that does not."""
    json = figures / f"{of or name}.json"
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
    return Part(f"bench.{of or name}", command, limit_s, model is not None, json.name)
