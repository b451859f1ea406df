"""Tokens a second with drafts against without, side by side.

    python -m bench.speculative --json FILE [--cases repeats,agrees] [--batches 1,4,16]
    python -m bench.speculative --model DIR [--cases edit,quote,chat,again]         real text (real_text.py)

Each case has engines with and without drafts in this process, which take the same conversations in turns, at
temperature 1. workload.py says whose text is guessed by whom, models.py how it is made so. `ratio` is tokens
a second, from each answer's first one on, over those without drafts in the same round; `itl_ratio` likewise;
`acceptance` is the share of the verified drafts that was right. Then decode with a prefill rank in a process
of its own: acceptance where KV comes by wire over that where decode computes all itself, and whether what
moved is what the groups say.
"""

import argparse
import asyncio
import logging
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from bench.decode_cache.ranks import RankSettings, open_side
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, table, verdict, write_json
from bench.speculative import models, real_text, summary
from bench.speculative.measure import Generate, Run, run
from bench.speculative.summary import Counts
from bench.speculative.workload import CASES, RIGHT, TEXT_SEED, Case, Conversation, conversations
from services.engine.base import DecodeEngine
from services.engine.choose import decode_engine
from services.engine.engine_config import EngineConfig
from services.engine.paged.drafters import Mode
from services.kv.transfer_plan import moved_bytes
from services.values.kv import KvLayout
from services.values.rank import Generation, Plan, RankId
from services.values.rank_reports import RankLoad

OFF: Mode = "off"
_PAGE_SIZE, _TURNS = 16, 2
# A case, how many, turns of each, and a seed.
Talk = Callable[[Case, int, int, int], list[Conversation]]
_PAIRED = next(case for case in CASES if case.name == "agrees")


class Checkpoints:
    """Each checkpoint that is wanted is written once. `given` is the target, where it is not made here."""

    def __init__(self, folder: Path, given: Path | None = None) -> None:
        self._folder = folder
        self._given = given

    def target(self, share: float) -> str:
        return str(self._given or self._written("target", models.TARGET, share, TEXT_SEED))

    def draft(self, seed: int | None) -> str | None:
        return None if seed is None else self._written("draft", models.DRAFT, RIGHT, seed)

    def _written(self, name: str, shape: models.Shape, share: float, seed: int) -> str:
        directory = self._folder / f"{name}-{share}-{seed}"
        if not directory.exists():
            models.write(directory, shape, share=share, seed=seed)
        return str(directory)


@asynccontextmanager
async def engine_of(settings: EngineConfig) -> AsyncIterator[DecodeEngine]:
    engine = decode_engine(settings, RankId("decode", 0, Generation(secrets.randbits(64))))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def settings_of(
    case: Case, mode: Mode, checkpoints: Checkpoints, draft_tokens: int, kv_pages: int
) -> EngineConfig:
    return EngineConfig(
        engine="torch",
        model=checkpoints.target(case.share),
        model_name="bench",
        num_threads=1,
        self_check="off",
        kv_pages=kv_pages,
        page_size=_PAGE_SIZE,
        index_block=_PAGE_SIZE,
        transport="local",
        speculation=mode,
        draft_tokens=draft_tokens,
        draft_model=(checkpoints.draft(case.draft_seed) or "") if mode == "draft" else "",
    )


def local(engine: DecodeEngine) -> Generate:
    return lambda request: engine.generate(request, None)


async def compare(
    case: Case, checkpoints: Checkpoints, talk: Talk, arguments: argparse.Namespace
) -> list[Row]:
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        engines: dict[Mode, DecodeEngine] = {}
        for mode in (OFF, *case.modes):
            settings = settings_of(case, mode, checkpoints, arguments.draft_tokens, arguments.kv_pages)
            engines[mode] = await stack.enter_async_context(engine_of(settings))
        for engine in engines.values():
            await run(local(engine), talk(case, 4, 1, 0), arguments.answer, Plan.LOCAL)
        for batch in arguments.batches:
            rows += await _of_batch(case, batch, engines, talk, arguments)
    return rows


async def _of_batch(
    case: Case, batch: int, engines: dict[Mode, DecodeEngine], talk: Talk, arguments: argparse.Namespace
) -> list[Row]:
    runs: dict[Mode, list[Run]] = {mode: [] for mode in engines}
    before = {mode: _counts(engine.load()) for mode, engine in engines.items()}
    for round_ in range(arguments.rounds):
        talks = talk(case, batch, _TURNS if batch < 16 else 1, 1 + 1000 * batch + round_)
        for mode in runs if round_ % 2 == 0 else reversed(runs):
            runs[mode].append(await run(local(engines[mode]), talks, arguments.answer, Plan.LOCAL))
    return [
        summary.row(
            case.name, batch, mode, runs[OFF], runs[mode], _counts(engines[mode].load()).since(before[mode])
        )
        for mode in case.modes
    ]


def _counts(load: RankLoad) -> Counts:
    return Counts(load.drafted_tokens, load.accepted_draft_tokens)


async def paired(checkpoints: Checkpoints, arguments: argparse.Namespace) -> tuple[Row, list[Row]]:
    """Plan remote over plan local, on the same ranks, with a draft on both."""
    settings = RankSettings(
        model_path=checkpoints.target(RIGHT),
        decode_pages=4096,
        prefill_pages=4096,
        page_size=_PAGE_SIZE,
        chunk_size=512,
        max_running_requests=16,
        num_threads=1,
        transport=arguments.transport,
        speculation="draft",
        draft_model=checkpoints.draft(TEXT_SEED) or "",
    )
    counts: dict[Plan, Counts] = {}
    async with open_side(settings, decode_cache=True) as side:
        for plan in Plan:
            before = _counts(side.load())
            for round_ in range(arguments.rounds):
                talks = conversations(_PAIRED, 4, _TURNS, round_)
                ran = await run(
                    partial(side.generate, plans=frozenset({plan})), talks, arguments.answer, plan
                )
                due = [_due(side.layout, answer.prompt_tokens, answer.hit_tokens) for answer in ran.answers]
                moved_right = plan is Plan.LOCAL or due == [answer.moved_bytes for answer in ran.answers]
            counts[plan] = _counts(side.load()).since(before)
    remote, alone = counts[Plan.REMOTE].acceptance, counts[Plan.LOCAL].acceptance
    ratio = remote / alone if remote and alone else None
    row: Row = {"acceptance_local": alone, "acceptance_remote": remote, "moved_as_groups_say": moved_right}
    return row, [
        verdict("acceptance by wire over that in one process", ">=", 0.99, ratio),
        verdict("moved bytes are what the groups say", ">=", 1.0, float(moved_right)),
    ]


def _due(layout: KvLayout, prompt_tokens: int, hit_tokens: int) -> int:
    return sum(moved_bytes(hit_tokens, prompt_tokens, layout))


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Decoding with drafts against decoding without.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, help="a checkpoint: real text, and drafts by lookup and tree")
    parser.add_argument("--cases", type=lambda names: names.split(","), help="default: all")
    parser.add_argument("--kv-pages", type=int, default=4096, help="of an engine, of 16 tokens each")
    parser.add_argument(
        "--batches", type=lambda sizes: [int(s) for s in sizes.split(",")], default=[1, 4, 16]
    )
    parser.add_argument("--answer", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transport", choices=["nixl", "local"], default="nixl")
    return parser.parse_args()


async def measure(arguments: argparse.Namespace) -> tuple[list[Row], Row, list[Row]]:
    """All that is known of real text beforehand is that drafts change neither texts nor hits."""
    cases: Sequence[Case] = CASES
    talk: Talk = conversations
    if arguments.model is not None:
        cases, talk = real_text.CASES, real_text.RealText(arguments.model).conversations
    chosen: Sequence[Case] = [
        case for case in cases if case.name in (arguments.cases or [c.name for c in cases])
    ]
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        checkpoints = Checkpoints(Path(folder), arguments.model)
        rows = [row for case in chosen for row in await compare(case, checkpoints, talk, arguments)]
        if arguments.model is not None:
            return rows, {}, summary.loss_goals(rows)
        pair, pair_goals = await paired(checkpoints, arguments)
    return rows, pair, [*summary.goals(rows), *pair_goals]


def main() -> None:
    end_as_by_ctrl_c()
    disable_progress_bar()
    logging.basicConfig(level=logging.WARNING)
    arguments = parse_arguments()
    rows, pair, goals = asyncio.run(measure(arguments))
    for part in filter(None, (rows, [pair] if pair else [], goals)):
        print(table(part), end="\n\n")
    if arguments.json:
        settings: Row = {name: value for name, value in vars(arguments).items() if name != "json"}
        settings["model"] = None if arguments.model is None else arguments.model.name
        write_json(arguments.json, "speculative", settings, rows, {"paired": pair, "goals": goals})


if __name__ == "__main__":
    main()
