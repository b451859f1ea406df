"""This benchmark tells how much of the turn before a decode rank holds in a tool loop, by format and by
client.

    PYTHONPATH=.:tests python -m bench.tool_loops --calls 8 --json FILE

One prefill and one decode rank of the fake engine, which says what a script has for it: nothing is timed. The
formats and the agents are the tests' (tests/router/templates). `held` is what the decode rank had of the last
request and, of the request before it, prompt and answer without the last token, of which nothing is stored;
`least` the smallest share of that in the loop. `forgetful` is the same with a router that looks nothing up.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from bench.report import Row, table, write_json
from cluster.harness import BLOCK, FakeCluster
from cluster.tool_loops import Script, Step, play
from router.templates.agents import CLIENTS
from router.templates.formats import FORMATS
from services.etcd.embedded import EmbeddedEtcd
from services.router.text.chat_memory import AnswerMemory

_PAGES = 16_384


async def measure(formats: Sequence[str], num_calls: int) -> list[Row]:
    with TemporaryDirectory() as directory:
        etcd = EmbeddedEtcd(Path(directory) / "etcd")
        await etcd.start()
        try:
            return [
                row for name in formats for row in await _measure_format(name, num_calls, etcd, directory)
            ]
        finally:
            await etcd.stop()


async def _measure_format(name: str, num_calls: int, etcd: EmbeddedEtcd, directory: str) -> list[Row]:
    model, script, rows = FORMATS[name].save(Path(directory) / name), Script(), list[Row]()
    script.install(setattr)
    async with FakeCluster(etcd.endpoint, model, name, decode=(1,), kv_pages=_PAGES) as cluster:
        for client, does in CLIENTS.items():
            steps = await play(cluster, script, FORMATS[name], does, num_calls, f"{client}, known")
            with patch.object(AnswerMemory, "recall", lambda *_: None):
                forgotten = await play(cluster, script, FORMATS[name], does, num_calls, f"{client}, unknown")
            rows.append(
                {"format": name, "client": client} | _figures(steps) | _figures(forgotten, "forgetful_")
            )
    return rows


def _figures(steps: Sequence[Step], prefix: str = "") -> Row:
    return {
        f"{prefix}held": f"{steps[-1].decode_prefix_len} of {steps[-1].held}",
        f"{prefix}least": round(min(step.decode_prefix_len / step.held for step in steps), 3),
        f"{prefix}whole": all(step.held - BLOCK < step.decode_prefix_len for step in steps),
        f"{prefix}steps": [[step.prompt_tokens, step.held, step.decode_prefix_len] for step in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=8, help="calls of a loop, one after the other")
    parser.add_argument("--format", choices=FORMATS, action="append", help="default: all")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.format or list(FORMATS), arguments.calls))
    print(table([{name: row[name] for name in row if not name.endswith("steps")} for row in rows]))
    if arguments.json:
        write_json(arguments.json, "tool_loops", {"calls": arguments.calls, "page_size": BLOCK}, rows)


if __name__ == "__main__":
    main()
