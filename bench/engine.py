"""This benchmark measures what a step of the torch engine costs beside `transformers` with its own cache, on
the same checkpoint.

    python -m bench.engine --json FILE [--device cuda]

Decode: a batch of sequences with the same context, one token each. *plain* is our runner with private
pages, so that every sequence attends by itself; *shared* has the context in common and attends to it
together; *transformers* is one batched forward pass with its DynamicCache and sdpa, which knows of no
sharing. A step ends with the chosen token ids in Python. `same_tokens` is the share of sequences for which
plain and transformers choose the same token from the same KV.
Prefill: one prompt, ours in chunks as an engine runs it, `transformers` in one forward pass.
Constraints: the same batch with and without one (bench/constrained.py).
Sampling: what choosing the tokens adds to a step, for logits of a large vocabulary, by who asks for what;
"constrained" with making the masks, which in a step happens while the model computes.
The sides alternate step by step within a run. Ratios are tokens per second over those of `transformers`,
taken within each round; spreads are the middle half over the median.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from bench.checkpoint import Size, checkpoint
from bench.constrained import CONSTRAINT, ConstrainedBatch, LargeVocabulary, cost_goals, cost_row
from bench.device import CPU, device_named
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, spread, table, write_json
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.paged_kv import PagedKv
from services.engine.torch.runner import TorchRunner
from services.engine.torch.sampling.device_sampler import open_sampler
from services.engine.torch.sampling.torch_sampler import sample
from services.grammar.grammars import Grammars
from services.values.kv import PageId
from services.values.request import SamplingParams

GREEDY = SamplingParams(temperature=0)
FIRST_ID = 5
WARM_UP_ROUNDS = 2  # not counted

SAMPLING_VOCAB_SIZE = 151_936  # that of Qwen
SAMPLING_BATCHES = (16, 64)
SAMPLING_HISTORY = 2048  # tokens, half of them generated
SAMPLING_CASES = {
    "greedy": SamplingParams(temperature=0),
    "greedy, logprobs 5": SamplingParams(temperature=0, logprobs=5),
    "temperature 1": SamplingParams(),
    "temperature 1, logprobs 5": SamplingParams(logprobs=5),
    "temperature 0.7, top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "top_k 50, top_p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "greedy, repetition_penalty 1.1": SamplingParams(temperature=0, repetition_penalty=1.1),
    "temperature 1, frequency_penalty 0.5": SamplingParams(frequency_penalty=0.5),
}

# (batch, context, tokens/s of what over those of transformers, at least)
DECODE_GOALS = (
    (1, 256, "plain_ratio", 1.0),
    (1, 2048, "plain_ratio", 1.0),
    (16, 2048, "shared_ratio", 6.0),
    (16, 2048, "plain_ratio", 1.5),
)


@dataclass(frozen=True, slots=True)
class Plan:
    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]
    rounds: int
    page_size: int
    chunk_size: int

    @property
    def num_pages(self) -> int:
        grown = max(self.contexts) + self.rounds + WARM_UP_ROUNDS
        return (2 * max(self.batches) + 1) * (grown // self.page_size + 2)


@dataclass(slots=True)
class Pages:
    """Page tables over one pool, in the order of their numbers."""

    num_pages: int
    page_size: int
    free: list[PageId] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = [PageId(page) for page in range(self.num_pages)]

    def take(self, num_tokens: int) -> list[PageId]:
        count = -(-num_tokens // self.page_size)
        taken, self.free = self.free[:count], self.free[count:]
        return taken


class Ours:
    """A batch on our runner, one token further with each step."""

    def __init__(self, runner: TorchRunner, tables: Sequence[list[PageId]], context: int) -> None:
        self._runner = runner
        self.tables = tables
        self._ids = [FIRST_ID + row for row in range(len(tables))]
        self._end = context

    def step(self) -> list[int]:
        chunks = [
            Chunk([token_id], self._end, pages, True, GREEDY)
            for token_id, pages in zip(self._ids, self.tables, strict=True)
        ]
        self._ids = [sampled.token_id for (sampled,) in self._runner.run(chunks)]
        self._end += 1
        return self._ids


class Transformers:
    """The same batch with a DynamicCache, filled from the pages of `tables`."""

    def __init__(
        self, model: PreTrainedModel, kv: PagedKv, tables: Sequence[list[PageId]], context: int
    ) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._ids = [FIRST_ID + row for row in range(len(tables))]
        for layer in range(kv.shape.num_layers):
            key, value = (_gather(pages, tables, context).to(kv.compute_dtype) for pages in kv.layer(layer))
            self._cache.update(key, value, layer)

    @torch.inference_mode()
    def step(self) -> list[int]:
        token_ids = torch.tensor(self._ids, device=self._model.device)
        outputs = self._model(input_ids=token_ids[:, None], past_key_values=self._cache, logits_to_keep=1)
        self._ids = outputs.logits[:, -1].argmax(-1).tolist()
        return self._ids


def _gather(pages: torch.Tensor, tables: Sequence[list[PageId]], context: int) -> torch.Tensor:
    """[batch, num_kv_heads, context, head_dim] from [num_pages, num_kv_heads, page_size, head_dim]."""
    numbers = pages.view(torch.uint8) if pages.itemsize == 1 else pages  # torch selects none of 8 bits
    rows = [numbers[list(table)].transpose(0, 1).flatten(1, 2)[:, :context] for table in tables]
    return torch.stack(rows).view(pages.dtype)


def seconds(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def alternate(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each action in each round; who goes first moves on by one each round."""
    names = list(actions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + WARM_UP_ROUNDS):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            took_s = seconds(actions[name])
            if round_ >= WARM_UP_ROUNDS:
                samples[name].append(took_s)
    return samples


def figures(samples: dict[str, list[float]], tokens: int, unit_s: float, unit: str) -> Row:
    """Medians, tokens per second, ratios to transformers within each round, and spreads."""
    theirs = samples["transformers"]
    row: Row = {f"{name}_{unit}": median(taken) / unit_s for name, taken in samples.items()}
    row |= {f"{name}_tokens_s": tokens / median(taken) for name, taken in samples.items()}
    for name in samples:
        if name == "transformers":
            continue
        ratios = [other / own for own, other in zip(samples[name], theirs, strict=True)]
        row |= {f"{name}_ratio": median(ratios), f"{name}_ratio_spread": spread(ratios)}
    return row | {f"{name}_spread": spread(taken) for name, taken in samples.items()}


def decode_rows(runner: TorchRunner, model: PreTrainedModel, plan: Plan) -> list[Row]:
    return [
        _decode_row(runner, model, plan, batch, context)
        for context in plan.contexts
        for batch in plan.batches
    ]


def _decode_row(runner: TorchRunner, model: PreTrainedModel, plan: Plan, batch: int, context: int) -> Row:
    grown = context + plan.rounds + WARM_UP_ROUNDS
    pages = Pages(runner.memory.num_pages, plan.page_size)
    private = [pages.take(grown) for _ in range(batch)]
    prefix = pages.take(context // plan.page_size * plan.page_size)
    tails = [pages.take(grown - len(prefix) * plan.page_size) for _ in range(batch)]
    kv = runner._pools.layers.pools[0]  # to fill it: an engine's comes from prefill
    plain = Ours(runner, private, context)
    shared = Ours(runner, [prefix + tail for tail in tails], context)
    theirs = Transformers(model, kv, private, context)
    agreed = _agreement(
        Ours(runner, private, context).step(), Transformers(model, kv, private, context).step()
    )
    samples = alternate(
        {"plain": plain.step, "shared": shared.step, "transformers": theirs.step}, plan.rounds
    )
    return {"batch": batch, "context": context, "same_tokens": agreed} | figures(samples, batch, 1e-3, "ms")


def _agreement(ours: Sequence[int], theirs: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def constraint_rows(runner: TorchRunner, grammars: Grammars, plan: Plan) -> list[Row]:
    rows = []
    for context, batch in product(plan.contexts, plan.batches):
        grown = context + plan.rounds + WARM_UP_ROUNDS
        pages = Pages(runner.memory.num_pages, plan.page_size)
        tables = [pages.take(grown) for _ in range(batch)]
        free = Ours(runner, tables, context)
        constrained = ConstrainedBatch(runner, tables, context, grammars)
        samples = alternate({"free": free.step, "constrained": constrained.step}, plan.rounds)
        rows.append(cost_row(batch, context, samples))
    return rows


def prefill_rows(runner: TorchRunner, model: PreTrainedModel, plan: Plan, rng: random.Random) -> list[Row]:
    rows = []
    for length in plan.prompts:
        prompt = [rng.randrange(FIRST_ID, 500) for _ in range(length)]
        pages = Pages(runner.memory.num_pages, plan.page_size).take(length)

        def ours(prompt: list[int] = prompt, pages: list[PageId] = pages) -> int:
            return prefill(runner, prompt, pages, plan.chunk_size)

        def theirs(prompt: list[int] = prompt) -> int:
            return int(prefill_with_transformers(model, prompt))

        agreed = ours() == theirs()
        samples = alternate({"ours": ours, "transformers": theirs}, max(3, plan.rounds // 3))
        rows.append({"prompt": length, "same_token": agreed} | figures(samples, length, 1.0, "s"))
    return rows


def prefill(runner: TorchRunner, prompt: Sequence[int], pages: list[PageId], chunk_size: int) -> int:
    """Return the first token after `prompt`."""
    for start in range(0, len(prompt), chunk_size):
        part = prompt[start : start + chunk_size]
        last = start + len(part) == len(prompt)
        [choices] = runner.run([Chunk(part, start, pages, last, GREEDY)])
    [sampled] = choices
    return sampled.token_id


@torch.inference_mode()
def prefill_with_transformers(model: PreTrainedModel, prompt: Sequence[int]) -> int:
    cache = DynamicCache(config=model.config)
    token_ids = torch.tensor([prompt], device=model.device)
    outputs = model(input_ids=token_ids, past_key_values=cache, logits_to_keep=1)
    return int(outputs.logits[0, -1].argmax())


def sampling_rows(plan: Plan, seed: int, device: torch.device) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    shape = (max(SAMPLING_BATCHES), SAMPLING_VOCAB_SIZE)
    logits = (3 * torch.randn(shape, generator=generator)).to(device)
    history = torch.randint(SAMPLING_VOCAB_SIZE, (SAMPLING_HISTORY,), generator=generator).tolist()
    rows = [
        _sampling_row(case, params, logits[:batch], history, plan.rounds)
        for batch in SAMPLING_BATCHES
        for case, params in SAMPLING_CASES.items()
    ]
    return rows + _constrained_sampling_rows(logits, plan.rounds)


def _constrained_sampling_rows(logits: torch.Tensor, rounds: int) -> list[Row]:
    large, rows = LargeVocabulary(SAMPLING_VOCAB_SIZE), list[Row]()
    for batch, case in product(SAMPLING_BATCHES, ("greedy", "temperature 1")):
        chunks = large.chunks(batch, SAMPLING_CASES[case])
        choose = partial(large.sample, logits[:batch], chunks)
        taken = alternate({"sampling": choose}, rounds)["sampling"]
        name = f"{case}, constrained"
        rows.append({"batch": batch, "sampling": name, "ms": median(taken) * 1e3, "spread": spread(taken)})
    return rows


def _sampling_row(
    case: str, params: SamplingParams, logits: torch.Tensor, history: Sequence[int], rounds: int
) -> Row:
    chunks = [
        Chunk(history[-1:], len(history) - 1, [], True, replace(params, seed=row), history, len(history) // 2)
        for row in range(len(logits))
    ]
    # As the runner chooses: on a GPU by kernels.
    choose = open_sampler(logits.device, logits.shape[1], logits.dtype) or sample
    taken = alternate({"sampling": lambda: choose(logits, chunks)}, rounds)["sampling"]
    return {"batch": len(logits), "sampling": case, "ms": median(taken) * 1e3, "spread": spread(taken)}


def goals(rows: Sequence[Row]) -> list[Row]:
    by_case = {(row["batch"], row["context"]): row for row in rows}
    return [
        {"batch": batch, "context": context, "what": what, "wanted": wanted, "got": got, "met": got >= wanted}
        for batch, context, what, wanted in DECODE_GOALS
        if isinstance(got := by_case.get((batch, context), {}).get(what), float)
    ]


@dataclass(frozen=True, slots=True)
class Where:
    """Both sides compute on this device, in this type; `dtype` None is the checkpoint's, float32."""

    device: torch.device
    dtype: str | None
    num_threads: int


def run(
    size: Size, plan: Plan, where: Where, seed: int, directory: Path | None = None
) -> tuple[list[Row], list[Row], list[Row]]:
    disable_progress_bar()
    with checkpoint(size, directory) as chosen:
        runner = TorchRunner(
            chosen,
            device=str(where.device),
            dtype=where.dtype,
            num_pages=plan.num_pages,
            page_size=plan.page_size,
            num_threads=where.num_threads,
        )
        grammars = Grammars(chosen, runner.vocab_size)
        grammars.check(CONSTRAINT)
        dtype = getattr(torch, where.dtype or "float32")
        model = AutoModelForCausalLM.from_pretrained(chosen, attn_implementation="sdpa", dtype=dtype)
        model = model.to(where.device).eval()
    runner._pools.layers.pools[0].numbers.normal_(generator=torch.Generator(where.device).manual_seed(seed))
    rows = decode_rows(runner, model, plan)
    prefills = prefill_rows(runner, model, plan, random.Random(seed))
    return rows, prefills, constraint_rows(runner, grammars, plan)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048])
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[256, 2048], help="prompt lengths for prefill"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--num-threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", type=device_named, default=CPU, help="cpu (default), cuda or cuda:N")
    parser.add_argument("--dtype", help="default: float32 on the CPU, else bfloat16")
    parser.add_argument(
        "--model", "--checkpoint", dest="checkpoint", type=Path, help="run this one, not one made for the run"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    size = Size(arguments.layers, arguments.hidden, max(*arguments.contexts, *arguments.prompts) + 1024)
    plan = Plan(
        arguments.batches,
        arguments.contexts,
        arguments.prompts,
        arguments.rounds,
        arguments.page_size,
        arguments.chunk_size,
    )
    load = os.getloadavg()[0]
    dtype = arguments.dtype or ("bfloat16" if arguments.device.type == "cuda" else None)
    where = Where(arguments.device, dtype, arguments.num_threads)
    decode, prefills, constrained = run(size, plan, where, arguments.seed, arguments.checkpoint)
    samplings = sampling_rows(plan, arguments.seed, where.device)
    met = goals(decode) if where.device.type == "cpu" else []  # they were set for a CPU
    measured = decode, prefills, constrained, samplings
    costs = cost_goals(constrained)
    print("\n\n".join(table(rows) for rows in (*measured, met, costs) if rows))
    print(f"\nload average when it began: {load:.1f}; torch threads: {arguments.num_threads}")
    if arguments.json is not None:
        unsaid = {"json", "checkpoint"} | ({"layers", "hidden"} if arguments.checkpoint else set())
        settings: Row = {k: v for k, v in vars(arguments).items() if k not in unsaid}
        settings |= {"device": str(where.device), "dtype": where.dtype or "float32", "load_at_start": load}
        write_json(arguments.json, "engine", settings, [*chain(*measured), *met, *costs])


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
