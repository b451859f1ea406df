"""Mixed load above capacity on a real cluster for minutes: what breaks, and what grows.

    python -m bench.soak --minutes 10 --json FILE [--engine torch --transport nixl]

Router, prefill rank, two decode ranks and etcd are processes of their own. The fake engine computes, so that
every token of every answer is known and checked. With `--engine torch` a small model does: then some answers
are asked for once more in the quiet cluster, and none may come out otherwise. Conversations, groups that
share a system prompt, long prompts that come once, short ones; one in twelve is aborted by its client.

    closed loop, 96 clients --> capacity (requests/s) --> open loop at 1.2 times that, each with a deadline

Past its capacity a cluster must say no, and say it at once: RESOURCE_EXHAUSTED. `late_share` is of those that
were let in and waited for nothing, for their deadline ended them: one in a hundred may, and that is no error.
Any other error counts as one, as do a wrong token, a traceback in a log and a rank that had to be started
again; in the quiet cluster a refusal and a missed deadline too. In the end nothing is held, and requests are
aborted one by one, to see how long both ranks take to have everything back. Who was not under way any more
when it was to be aborted does not count, and another is asked for.
"""

import asyncio
import contextlib
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, table, verdict, write_json
from bench.soak.load import QUIET_ABORTS, Outcomes, Soak, late_share
from bench.soak.ranks import NUM_PAGES, PAGE_SIZE, Memory, Ranks
from services.cli.local.local_cluster import LocalCluster, Shape
from services.cli.model.make_model import make_model
from services.engine.fake import continuation
from services.net import channels
from services.wire.isthmus.v1 import generation_pb2_grpc

RANK_FLAGS = (
    f"--page-size={PAGE_SIZE}",
    f"--kv-pages={NUM_PAGES}",
    "--chunk-size=256",
    "--max-running-requests=24",
)
ENGINE_FLAGS = {
    "fake": ("--engine=fake", "--fake-step-s=0.02", "--fake-prompt-token-s=0.0001"),
    "torch": ("--engine=torch",),
}
COMMON_FLAGS = (f"--index-block={PAGE_SIZE}", "--model-name=soaked")
OVERLOAD = 1.2
GOALS = (
    ("errors", "<=", 0.0),
    ("books_balanced", ">=", 1.0),
    ("memory_growth", "<=", 1.1),
    ("quiet_aborts", ">=", QUIET_ABORTS),
    ("abort_max_s", "<=", 2.0),
    ("late_share", "<=", 0.01),
)
# Where nobody knows beforehand what is right.
GOALS_ASKED_AGAIN = (("asked_again", ">=", 1.0), ("answered_otherwise", "<=", 0.0))


@dataclass(frozen=True)
class Settings:
    minutes: float
    seed: int
    engine: str
    transport: str

    @property
    def rank_flags(self) -> tuple[str, ...]:
        return (*RANK_FLAGS, *ENGINE_FLAGS[self.engine], f"--transport={self.transport}")


@dataclass(frozen=True)
class Report:
    """The figures, and what went wrong in words: each sentence or traceback once, and how often."""

    row: Row
    errors: list[Row]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="isthmus-soak-") as folder:
        yield Path(folder)


async def soak(settings: Settings) -> Report:
    ranks, rng = Ranks(), random.Random(settings.seed)
    expected = continuation if settings.engine == "fake" else None
    with _folder() as folder:
        make_model(folder / "model")
        shape = Shape(
            model=folder / "model",
            data_dir=folder / "data",
            common_flags=COMMON_FLAGS,
            rank_flags=settings.rank_flags,
            router_flags=("--chunk-size=256",),
        )
        async with LocalCluster(shape, ranks.note) as cluster:
            pids = ranks.pids | {"router": cluster.children["router"].process.pid}
            async with channels.open_channel(cluster.router_endpoint()) as channel:
                driver = Soak(generation_pb2_grpc.GenerationStub(channel), ranks, rng, expected)
                return await _measure(driver, Memory(pids), 60.0 * settings.minutes)


async def _measure(driver: Soak, memory: Memory, seconds: float) -> Report:
    ranks, warm, load = driver.ranks, Outcomes(), Outcomes()
    quiet = Outcomes(clean=frozenset())
    capacity = await driver.closed_loop(min(30.0, seconds / 6), warm)
    async with memory.watched():
        await driver.open_loop(seconds, OVERLOAD * capacity, load)
    await ranks.let_go()
    abort_s = await driver.quiet_aborts(quiet)
    otherwise = await driver.ask_again(quiet)
    sentences = Counter(warm.errors + load.errors + quiet.errors)
    growth = memory.growth()
    row: Row = {
        "capacity_per_s": capacity,
        "offered_per_s": sum(load.counts.values()) / seconds,
        **{f"num_{name}": count for name, count in sorted(load.counts.items())},
        "answered_per_s": load.counts["answered"] / seconds,
        "late_share": late_share((warm, load)),
        "refused_p50_s": statistics.median(load.refused_s) if load.refused_s else None,
        "ttft_p50_s": statistics.median(load.ttft_s),
        "errors": sentences.total() + ranks.tracebacks.total() + ranks.restarts,
        "tracebacks": ranks.tracebacks.total(),
        "restarts": ranks.restarts,
        "asked_again": driver.num_kept,
        "answered_otherwise": otherwise,
        "retractions": await ranks.total("isthmus_retractions_total"),
        "overtakes": await ranks.total("isthmus_overtakes_total"),
        "memory_growth": max(growth.values()),
        "memory_growth_of": max(growth, key=growth.__getitem__),
        "books_balanced": await ranks.balanced(),
        "quiet_aborts": len(abort_s),
        "abort_max_s": max(abort_s, default=None),
    }
    return Report(row, _counted(sentences) + _counted(ranks.tracebacks))


def _counted(texts: Counter[str]) -> list[Row]:
    return [{"count": count, "text": text} for text, count in texts.most_common()]


def verdicts(row: Row, engine: str) -> list[Row]:
    goals = GOALS if engine == "fake" else (*GOALS, *GOALS_ASKED_AGAIN)
    return [verdict(goal, sign, wanted, row[goal]) for goal, sign, wanted in goals]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of load above capacity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=sorted(ENGINE_FLAGS), default="fake")
    parser.add_argument("--transport", choices=("local", "nixl"), default="local")
    arguments = parser.parse_args()
    settings = Settings(arguments.minutes, arguments.seed, arguments.engine, arguments.transport)
    report = asyncio.run(soak(settings))
    print("\n".join(f"{name:>20}  {value}" for name, value in report.row.items()))
    for error in report.errors:
        print(f"\n{error['count']} times: {error['text']}")
    judged = verdicts(report.row, settings.engine)
    print(f"\n{table(judged)}\n")
    if arguments.json is not None:
        write_json(arguments.json, "soak", asdict(settings), [report.row], {"errors": report.errors})
    if missed := [str(each["goal"]) for each in judged if not each["met"]]:
        raise SystemExit(f"the soak missed its goals: {', '.join(missed)}")


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
