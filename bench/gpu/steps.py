"""This benchmark measures steps of the torch engine on a GPU, in each of its ways, beside what others do with
the same weights.

    python -m bench.gpu.steps --json FILE [--device cuda] [--cells build decode continuous prompts ..]

A way is a runner with or without captured graphs, with or without fused operators. A decode step goes on from
the same K and V on each side:

    transformers          eager, with its DynamicCache and sdpa: what ratios are of, within each round
    transformers static   its StaticCache, captured by hand (transformers_peers.py)
    loop ..               a hand-written loop in one graph: the upper bound (loop.py)
    .. shared             our runner where the sequences have their context in common

The sides take turns step by step, for ratios, and then each goes some steps alone. A side that cannot run is
left out, with the end of its traceback.

transformers' continuous batching is a loop of its own, so it is timed alone (`continuous`), between tokens of
requests that all generate. `--cells compiled` times that static step after torch.compile beside the one
without, and how long it takes to start; nothing else of ours or theirs is compiled.
"""

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import Any, Protocol

import torch
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar

from bench.device import CPU, device_named
from bench.engine import (
    FIRST_ID,
    GREEDY,
    Ours,
    Pages,
    Transformers,
    alternate,
    prefill,
    prefill_with_transformers,
    seconds,
)
from bench.gpu.captured import finish
from bench.gpu.cells import Cell, run_cells, tail_of
from bench.gpu.launches import host_rows, launch_rows
from bench.gpu.loop import Loop, flash, merged, paged
from bench.gpu.model import random_model, runner_on, size_on
from bench.gpu.transformers_peers import StaticTransformers, gaps_of_continuous_batching
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, spread
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.paged_kv import PagedKv
from services.engine.torch.runner import TorchRunner
from services.values.kv import PageId

# The way that a runner takes by itself comes first, for it matters most if the time is short.
WAYS: dict[str, dict[str, Any]] = {
    "full+fused": {"graph_mib": None, "fuses": True},
    "eager": {"graph_mib": 0, "fuses": False},
    "full": {"graph_mib": None, "fuses": False},
    "eager+fused": {"graph_mib": 0, "fuses": True},
    "fp8 kv": {"graph_mib": None, "fuses": True, "kv_dtype": "fp8_e4m3"},
    "fp8": {"graph_mib": None, "fuses": True, "kv_dtype": "fp8_e4m3", "weights": "fp8"},
}
SECTIONS = ("build", "decode", "continuous", "prompts", "launches", "host")
COMPILED = (1, 16)  # batches
PACKED = (8, 256)  # prompts of so many tokens in one step
_MARGIN = 40  # steps beyond the context for which a table has pages
_PROMPT_ROUNDS = 5
_ALONE = 9  # steps of one side in a row


class Side(Protocol):
    def step(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Plan:
    batches: Sequence[int]
    context: int
    prompts: Sequence[int]
    rounds: int
    page_size: int
    chunk_size: int
    num_threads: int

    @property
    def table_pages(self) -> int:
        return -(-(self.context + self.rounds + _MARGIN) // self.page_size)

    @property
    def num_pages(self) -> int:
        packed = PACKED[0] * -(-PACKED[1] // self.page_size)
        longest = -(-max(self.prompts) // self.page_size)
        return max(max(self.batches) * self.table_pages, longest, packed)


@dataclass
class Steps:
    """One runner is there at a time: each has a pool, and all of them would not fit."""

    plan: Plan
    device: torch.device
    _way: str = ""
    _runner: TorchRunner | None = None
    _refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.set_num_threads(self.plan.num_threads)
        self.model = random_model(size_on(self.device), self.device)
        pages = Pages(self.plan.num_pages, self.plan.page_size)
        room = self.plan.table_pages
        self.tables = [pages.free[i * room : (i + 1) * room] for i in range(max(self.plan.batches))]
        self.all_pages = list(pages.free)

    def cells(self, ways: Sequence[str], sections: Sequence[str]) -> list[Cell]:
        cells: list[Cell] = []
        for index, way in enumerate(ways):
            own = [Cell(f"build {way}", "starts", partial(self.build, way))]
            own += [
                Cell(f"decode {way} {batch}", "decode", partial(self.decode, way, batch, index == 0))
                for batch in self.plan.batches
            ]
            own.append(Cell(f"prompts {way}", "prompts", partial(self.prompts, way)))
            if way == "eager":
                own.append(Cell(f"host {way}", "host", partial(self.host, way)))
            cells += own
        cells += [
            Cell(f"continuous {batch}", "decode", partial(self.continuous, batch))
            for batch in self.plan.batches
        ]
        cells += [
            Cell(f"compiled {batch}", "compiled", partial(self.compiled, batch))
            for batch in self.plan.batches
            if batch in COMPILED
        ]
        # A profiler may leave launches slower than they were, so it comes last.
        cells += [
            Cell(f"launches {way}", "launches", partial(self.launches, way))
            for way in reversed(ways)
            if way in (ways[0], "eager")
        ]
        return [cell for cell in cells if cell.name.split()[0] in sections]

    def runner(self, way: str) -> TorchRunner:
        """Raises RuntimeError where it could not be built before."""
        if self._runner is not None and self._way == way:
            return self._runner
        if way in self._refused:
            raise RuntimeError(f"{way} was not built: {self._refused[way]}")
        self._close()
        try:
            self._runner = runner_on(
                self.model,
                num_pages=self.plan.num_pages,
                page_size=self.plan.page_size,
                num_threads=self.plan.num_threads,
                max_rows=max(self.plan.batches),
                max_prompt_tokens=self.plan.chunk_size,
                **WAYS[way],
            )
        except Exception as error:
            self._refused[way] = f"{type(error).__name__}: {error}"[:300]
            raise
        self._way = way
        self._fill(self._kv)
        return self._runner

    def _fill(self, kv: PagedKv) -> None:
        """Fill the pool, page by page, for a type of 8 bits is made of a wider one."""
        generator = torch.Generator(self.device).manual_seed(1)
        for page in kv.numbers.view(-1, kv.shape.page_numbers):
            wide = torch.randn(len(page), generator=generator, device=self.device, dtype=kv.compute_dtype)
            page.copy_(kv.rounded(wide))

    def _close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self.free()

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _kv(self) -> PagedKv:
        assert self._runner is not None
        return self._runner._pools.layers.pools[0]

    def build(self, way: str) -> list[Row]:
        before, began_s = _free_mib(self.device), time.perf_counter()
        runner = self.runner(way)
        finish(self.device)
        took_s = time.perf_counter() - began_s
        pool_mib = runner._pools.layers.pools[0].numbers.nbytes / 2**20
        return [
            {
                "way": way,
                "seconds": took_s,
                "MiB": before - _free_mib(self.device),
                "of it pool": pool_mib,
                "options": str(WAYS[way]),
            }
        ]

    def decode(self, way: str, batch: int, beside_peers: bool) -> list[Row]:
        runner, tables, context = self.runner(way), self.tables[:batch], self.plan.context
        chosen: dict[str, list[int]] = {}
        steps: dict[str, Callable[[], object]] = {}

        def add(name: str, make: Callable[[], Side]) -> None:
            try:
                side = make()
                chosen[name] = side.step()
                steps[name] = side.step
            except Exception as error:
                print(f"decode {way} {batch} without {name!r}:\n{tail_of(error, 6)}", flush=True)

        add(way, lambda: Ours(runner, tables, context))
        add("transformers", lambda: Transformers(self.model, self._kv, tables, context))
        if beside_peers:
            self._add_peers(add, tables)
        before = Counter(runner.steps_by_way)
        try:
            samples = alternate(steps, self.plan.rounds)
            alone = {name: median(seconds(step) for _ in range(_ALONE)) for name, step in steps.items()}
        finally:
            steps.clear()
            self.free()
        taken = Counter(runner.steps_by_way) - before
        by = " ".join(f"{name} {count}" for name, count in taken.items())
        return _decode_rows(samples, alone, chosen, {"batch": batch, "context": context}, way, by)

    def _add_peers(self, add: Callable[[str, Callable[[], Side]], None], tables: list[list[PageId]]) -> None:
        runner, kv, context, batch = self._runner, self._kv, self.plan.context, len(tables)
        assert runner is not None
        room = self.plan.rounds + _MARGIN
        add("transformers static", lambda: StaticTransformers(self.model, kv, tables, context, room))
        weights = merged(self.model)
        contiguous = cache(lambda: flash(kv, tables, context))  # both loops have one copy
        on_pages = partial(paged, runner._pools.layers, tables, context)
        add("loop flash", lambda: Loop(self.model, weights, batch, context, contiguous()))
        add("loop flash lean", lambda: Loop(self.model, weights, batch, context, contiguous(), lean=True))
        add("loop paged lean", lambda: Loop(self.model, weights, batch, context, on_pages(), lean=True))
        if batch > 1:
            num_common = context // self.plan.page_size
            shared = [[*tables[0][:num_common], *table[num_common:]] for table in tables]
            add("shared", lambda: Ours(runner, shared, context))

    def continuous(self, batch: int) -> list[Row]:
        self._close()
        generator = random.Random(batch)
        context, num_tokens = self.plan.context, self.plan.rounds + _ALONE
        prompts = [[generator.randrange(FIRST_ID, 500) for _ in range(context)] for _ in range(batch)]
        gaps, attends = gaps_of_continuous_batching(self.model, prompts, num_tokens)
        self.free()
        name = "transformers continuous"
        row: Row = _decode_rows({name: gaps}, {name: median(gaps)}, {name: [0] * batch}, {}, "", "")[0]
        return [{"batch": batch, "context": context} | row | {"beside": "nothing", "by": attends}]

    def compiled(self, batch: int) -> list[Row]:
        runner, tables, context = self.runner("eager"), self.tables[:batch], self.plan.context
        assert runner is not None
        room = self.plan.rounds + _MARGIN
        plain = StaticTransformers(self.model, self._kv, tables, context, room)
        began_s = time.perf_counter()
        compiled = StaticTransformers(self.model, self._kv, tables, context, room, compiles=True)
        chosen = compiled.step()
        finish(self.device)
        cold_s = time.perf_counter() - began_s
        same = [a == b for a, b in zip(chosen, plain.step(), strict=True)]
        samples = alternate({"plain": plain.step, "compiled": compiled.step}, self.plan.rounds)
        self.free()
        return [
            {
                "batch": batch,
                "context": context,
                "starts in s": cold_s,
                "ms": 1e3 * median(samples["compiled"]),
                "not compiled ms": 1e3 * median(samples["plain"]),
                "x not compiled": _ratio(samples["plain"], samples["compiled"]),
                "same": sum(same) / len(same),
            }
        ]

    def prompts(self, way: str) -> list[Row]:
        runner, generator = self.runner(way), random.Random(1)
        rows = []
        for length in self.plan.prompts:
            ids = [generator.randrange(FIRST_ID, 500) for _ in range(length)]
            ours = partial(prefill, runner, ids, self.all_pages, self.plan.chunk_size)
            rows.append(_prompt_row(way, str(length), length, ours, partial(self._whole, ids)))
        count, length = PACKED
        several = [[generator.randrange(FIRST_ID, 500) for _ in range(length)] for _ in range(count)]
        together = partial(self._together, runner, several)
        theirs = partial(self._batch, several)
        rows.append(_prompt_row(way, f"{count} x {length}", count * length, together, theirs))
        self.free()
        return rows

    def _whole(self, ids: Sequence[int]) -> int:
        return int(prefill_with_transformers(self.model, ids))

    def _together(self, runner: TorchRunner, several: Sequence[list[int]]) -> list[int]:
        room = -(-len(several[0]) // self.plan.page_size)
        chunks = [
            Chunk(ids, 0, self.all_pages[i * room : (i + 1) * room], True, GREEDY)
            for i, ids in enumerate(several)
        ]
        return [sampled.token_id for (sampled,) in runner.run(chunks)]

    @torch.inference_mode()
    def _batch(self, several: Sequence[list[int]]) -> list[int]:
        cache = DynamicCache(config=self.model.config)
        token_ids = torch.tensor(several, device=self.device)
        outputs = self.model(input_ids=token_ids, past_key_values=cache, logits_to_keep=1)
        chosen: list[int] = outputs.logits[:, -1].argmax(-1).tolist()
        return chosen

    def launches(self, way: str) -> list[Row]:
        runner, rows = self.runner(way), []
        for batch in sorted({self.plan.batches[0], self.plan.batches[-1]}):
            side = Ours(runner, self.tables[:batch], self.plan.context)
            rows += launch_rows(way, f"batch {batch}", side.step, self.device)
        length = min(2048, max(self.plan.prompts))
        ids = [FIRST_ID + i % 400 for i in range(length)]
        prompt = partial(prefill, runner, ids, self.all_pages, self.plan.chunk_size)
        return rows + launch_rows(way, f"prompt {length}", prompt, self.device)

    def host(self, way: str) -> list[Row]:
        runner = self.runner(way)
        return host_rows(lambda: Ours(runner, self.tables[:1], self.plan.context).step)


def _free_mib(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] / 2**20 if device.type == "cuda" else 0.0


def _decode_rows(
    samples: dict[str, list[float]],
    alone: dict[str, float],
    chosen: dict[str, list[int]],
    shape: Row,
    way: str,
    by: str,
) -> list[Row]:
    """`alone` are the seconds of a step among others of its side."""
    theirs = samples.get("transformers")
    loops = [name for name in samples if name.startswith("loop")]
    best = min(loops, key=lambda name: median(samples[name]), default=None)
    rows = []
    for name, own in samples.items():
        told = [] if name == "shared" else chosen.get("transformers", [])
        same = [a == b for a, b in zip(chosen[name], told, strict=False)]
        rows.append(
            shape
            | {
                "beside": way,
                "side": name,
                "ms": 1e3 * median(own),
                "alone ms": 1e3 * alone[name],
                "tokens/s": int(len(chosen[name]) / median(own)),
                "x transformers": _ratio(theirs, own),
                "x loop": _ratio(samples[best], own) if best else "",
                "spread": spread(own),
                "same": sum(same) / len(same) if same else "",
                "by": by if name in (way, "shared") else "",
            }
        )
    return rows


def _ratio(theirs: Sequence[float] | None, own: Sequence[float]) -> float | str:
    """Return how many times as many tokens a second that is, within each round."""
    if theirs is None:
        return ""
    return median([other / mine for mine, other in zip(own, theirs, strict=True)])


def _prompt_row(
    way: str, prompt: str, tokens: int, ours: Callable[[], object], theirs: Callable[[], object]
) -> Row:
    same = ours() == theirs()
    samples = alternate({"ours": ours, "transformers": theirs}, _PROMPT_ROUNDS)
    own = samples["ours"]
    return {
        "prompt": prompt,
        "way": way,
        "ms": 1e3 * median(own),
        "transformers ms": 1e3 * median(samples["transformers"]),
        "tokens/s": int(tokens / median(own)),
        "x transformers": _ratio(samples["transformers"], own),
        "spread": spread(own),
        "same": same,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", type=device_named, default=CPU, help="cpu (default), cuda or cuda:N")
    parser.add_argument("--cells", nargs="+", default=SECTIONS, help="those that begin so; all but compiled")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), help="default: all")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--chunk-size", type=int, default=2048)
    parser.add_argument("--num-threads", type=int, default=4)
    arguments = parser.parse_args()
    disable_progress_bar()
    plan = Plan(
        arguments.batches,
        arguments.context,
        arguments.prompts,
        arguments.rounds,
        arguments.page_size,
        arguments.chunk_size,
        arguments.num_threads,
    )
    began_s = time.perf_counter()
    steps = Steps(plan, arguments.device)
    finish(arguments.device)
    print(f"the model was made in {time.perf_counter() - began_s:.1f} s", flush=True)
    settings: Row = {name: value for name, value in vars(arguments).items() if name not in ("json", "device")}
    cells = steps.cells(arguments.ways or list(WAYS), arguments.cells)
    run_cells("steps", cells, arguments.json, arguments.device, settings)


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
