"""This benchmark measures what decode's hits by attention alone are worth where layers have windows or
states, and what those weigh.

    python -m bench.hybrid --json FILE [--quick] [--only "window of 128 documents"]

Until now the least of all groups decided what a decode rank had of a prompt; a recurrent group, whose
state comes by wire, had nothing: hits of 0 (vllm 42524). Here decode matches attention's pages, and
windows' tails and one state come with the last chunk. Two parts:

    sides      bytes, TTFT and throughput of conversations, and of documents that groups of 8 ask about: both
               rules on the same requests in one run, each side with a prefill rank in a process of its own
    shortage   the documents again, in one memory that would hold 0.29 of the clients' requests unshared; with
               states of more and more tokens of attention: what they take is not there for pages

Memory is counted in tokens of attention and is the same for both sides. The side of the least of all groups
is charged one state or tail a request; ours all that its pools set aside, which is one, too, and what the
chunks of a step take of windows.

Engine fake computes exact tokens from real pages, windows and states, moves them over the transport, and
sleeps for as long as --step-ms and --prompt-token-us say: a step takes as long for many sequences as for one,
as on a GPU that waits for its memory, and ranks do not compete for this machine's cores.
"""

import argparse
import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from bench.decode_cache.ranks import RankSettings
from bench.decode_cache.workload import Workload
from bench.hybrid.measure import Case, Measured, measure
from bench.hybrid.memory import Division, Memory, shape_of
from bench.hybrid.models import Model, fake_hybrid, fake_windowed
from bench.hybrid.summary import shortage_row, side_rows, verdicts
from bench.hybrid.workload import GROUPS_AT_ONCE, conversations, documents
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, table, write_json

# In tokens of their attention: Qwen3.5 of 9B has 1,584, Qwen3.5-35B-A3B 3,168; Falcon-H1's defaults 259.
_STATES = (100, 450, 1584, 3168)
_WINDOW = 128  # gpt-oss's
_MAX_RUNNING = 64


@dataclass(frozen=True, slots=True)
class Load:
    """It sizes the workloads, and the memory for them."""

    context: int  # tokens of a document
    page_size: int
    chunk_size: int
    quick: bool

    def conversations(self, seed: int) -> Workload:
        return conversations(seed, self.quick)

    def documents(self, seed: int) -> Workload:
        return documents(seed, self.context, self.quick)

    def ample(self, model: Model) -> Case:
        """Conversations, all of which stay to their end; other pools are as ranks make them by default."""
        num_pages = self.conversations(0).pool_pages(self.page_size)
        division = Division(_MAX_RUNNING, num_pages, num_slots=None, num_window_pages=None)
        return Case(model, self.conversations, division, division)

    def short(self, model: Model) -> Case:
        """Documents, in a memory that holds some of the clients' requests where each has its own copy."""
        workload = self.documents(0)
        assert workload.held_share is not None
        held = max(1, round(workload.held_share * workload.concurrency))
        shape = shape_of(workload, self.context, GROUPS_AT_ONCE)
        memory = Memory(model.group, model.token_bytes, self.page_size, self.chunk_size)
        return Case(model, self.documents, memory.unshared(shape, held), memory.shared(shape, held))


def cases_of(models: Sequence[Model], load: Load) -> list[Case]:
    if load.quick:
        return [load.ample(models[0]), load.short(models[1])]
    return [*map(load.ample, models[:2]), *map(load.short, models)]


def models_of(arguments: argparse.Namespace) -> list[Model]:
    """Return a hybrid, a windowed one, and hybrids with more state."""
    first, *others = (fake_hybrid(tokens) for tokens in arguments.states)
    return [first, fake_windowed(_WINDOW, arguments.page_size), *others]


async def driven(
    cases: Sequence[Case], settings: RankSettings, arguments: argparse.Namespace
) -> list[Measured]:
    """One after the other, so that none waits for another's steps."""
    return [
        await measure(case, settings, arguments.rounds, arguments.seed, quick=arguments.quick)
        for case in cases
    ]


def rank_settings(arguments: argparse.Namespace) -> RankSettings:
    return RankSettings(
        model_path="",
        decode_pages=1,
        prefill_pages=max(4096, 64 * arguments.context // arguments.page_size),
        page_size=arguments.page_size,
        chunk_size=arguments.chunk_size,
        max_running_requests=_MAX_RUNNING,
        num_threads=1,
        transport=arguments.transport,
        engine_name="fake",
        fake_step_s=arguments.step_ms / 1e3,
        fake_prompt_token_s=arguments.prompt_token_us / 1e6,
    )


def main() -> None:
    arguments = _arguments()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("nixl").setLevel(logging.WARNING)
    load_at_start = os.getloadavg()[0]
    load = Load(arguments.context, arguments.page_size, arguments.chunk_size, arguments.quick)
    models = models_of(arguments)
    cases = [case for case in cases_of(models, load) if arguments.only in _name(case)]
    if not cases:
        raise SystemExit(f"nothing has {arguments.only!r}")
    measured = asyncio.run(driven(cases, rank_settings(arguments), arguments))
    sides = [row for each in measured for row in side_rows(each)]
    shortage = [shortage_row(each) for each in measured if each.case.has_one_turn]
    goals = verdicts(sides, shortage)
    print(f"load average at the start {load_at_start:.1f}")
    parts = {"sides": sides, "shortage": shortage, "goals": goals}
    for name, rows in parts.items():
        if rows:
            print(f"\n{name}\n{table(rows)}")
    if arguments.json is not None:
        settings: Row = {k: v for k, v in vars(arguments).items() if k != "json"}
        write_json(arguments.json, "hybrid", settings | {"load_at_start": load_at_start}, sides, dict(parts))


def _name(case: Case) -> str:
    return f"{case.model.name} {case.make(0).name}"


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke test: few and short requests")
    parser.add_argument("--only", default="", help="time what has this in 'MODEL WORKLOAD' alone")
    parser.add_argument("--rounds", type=int, default=1, help="of each side, on requests of their own")
    parser.add_argument("--context", type=int, help="tokens of a document; default 8192")
    parser.add_argument("--states", type=int, nargs="+", help="their weights, in tokens of their attention")
    parser.add_argument("--step-ms", type=float, help="default 15")
    parser.add_argument("--prompt-token-us", type=float, default=5.0)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--transport", default="local")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.context = arguments.context or (512 if quick else 8192)
    arguments.states = arguments.states or (_STATES[:1] if quick else _STATES)
    arguments.step_ms = arguments.step_ms or (1.0 if quick else 15.0)
    return arguments


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
