"""Several answers to one prompt, asked for in one request and in as many requests at once.

    PYTHONPATH=.:tests python -m bench.several_answers --answers 8 --prompt-tokens 2000 --json FILE

One prefill and two decode ranks of the torch engine in this process, new ones for each case. By plan: prompt
tokens that were computed, tokens whose KV crossed, pages held on decode ranks at most (looked at every few
milliseconds), and seconds until the first token and until the last answer ended.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.report import Row, table, write_json
from cluster.harness import FakeCluster
from exactness.reference import random_prompt
from services.cli.model.make_model import make_model
from services.etcd.embedded import EmbeddedEtcd
from services.router.request.client_request import seed_of
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Finish, GenerateRequest, TokenIds

_PAGE = 16


async def measure(num_answers: int, prompt_tokens: int, max_tokens: int) -> list[Row]:
    with TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        make_model(model, hidden_size=256, num_layers=4, max_context_tokens=8192)
        etcd = EmbeddedEtcd(Path(directory) / "etcd")
        await etcd.start()
        try:
            return [
                await _measure_case(plan, together, (num_answers, prompt_tokens, max_tokens), model, etcd)
                for plan in ("remote", "local")
                for together in (True, False)
            ]
        finally:
            await etcd.stop()


async def _measure_case(
    plan: str, together: bool, sizes: tuple[int, int, int], model: Path, etcd: EmbeddedEtcd
) -> Row:
    num_answers, prompt_tokens, max_tokens = sizes
    name = f"{plan}-{together}"
    cluster = FakeCluster(
        etcd.endpoint,
        model,
        name,
        decode=(1, 1),
        plans=(plan,),
        engine="torch",
        self_check="off",
        model=str(model),
        page_size=_PAGE,
        index_block=_PAGE,
        kv_pages=4096,
        chunk_size=512,
        num_threads=1,
    )
    async with cluster:
        await _ask(cluster, [_request(random_prompt(64, seed=1), 4, 1)])  # what is compiled is compiled
        ids = random_prompt(prompt_tokens, seed=2)
        requests = [_request(ids, max_tokens, 1, n=num_answers)]
        if not together:
            requests = [_request(ids, max_tokens, seed_of(1, index)) for index in range(num_answers)]
        watching = asyncio.create_task(_most_pages(cluster, most := [0]))
        finishes, first_s, took_s = await _ask(cluster, requests)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    usages = [finish.usage for finish in finishes]
    return {
        "plan": plan,
        "asked": f"n={num_answers}" if together else f"{num_answers} requests",
        "computed_tokens": sum(usage.computed_tokens for usage in usages),
        "delta_tokens": sum(usage.delta_tokens for usage in usages),
        "most_pages": most[0],
        "decode_ranks": len({finish.placement.decode.worker for finish in finishes}),
        "first_token_s": round(first_s, 3),
        "last_answer_s": round(took_s, 3),
    }


def _request(ids: Sequence[int], max_tokens: int, seed: int, n: int = 1) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.9, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(token_ids=TokenIds(ids=ids), sampling=sampling, n=n)


async def _ask(
    cluster: FakeCluster, requests: Sequence[GenerateRequest]
) -> tuple[list[Finish], float, float]:
    """All at once: what each answer ended with, seconds until the first token, and until the last answer."""
    began, finishes, firsts = time.monotonic(), list[Finish](), list[float]()

    async def ask(request: GenerateRequest) -> None:
        async for response in cluster.stubs[0].Generate(request, timeout=600):
            firsts.append(time.monotonic() - began)
            if response.HasField("finish"):
                finishes.append(response.finish)

    await asyncio.gather(*map(ask, requests))
    return finishes, min(firsts), time.monotonic() - began


async def _most_pages(cluster: FakeCluster, most: list[int]) -> None:
    """Held by sequences, on all decode ranks."""
    decodes = [rank for name, rank in cluster.ranks.items() if name.startswith("decode")]
    while True:
        books = await asyncio.gather(*(rank.engine.books() for rank in decodes))
        most[0] = max(most[0], sum(each.locked + each.private for each in books))
        await asyncio.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    sizes = (arguments.answers, arguments.prompt_tokens, arguments.max_tokens)
    rows = asyncio.run(measure(*sizes))
    print(table(rows))
    if arguments.json:
        names = ("answers", "prompt_tokens", "max_tokens")
        write_json(arguments.json, "several_answers", dict(zip(names, sizes, strict=True)), rows)


if __name__ == "__main__":
    main()
