"""`isthmus demo`: a cluster on this machine holds a conversation, and a table shows what moved."""

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from services.cli import screen
from services.cli.client import responses
from services.cli.local.cluster import LocalCluster, Shape
from services.cli.model.make_model import make_model
from services.cli.table import format_bytes, format_table
from services.net import channels
from services.settings.flags import load, setting
from services.wire.isthmus.v1 import common_pb2, generation_pb2

_QUESTIONS = (
    "What is an isthmus? Answer as if I had never seen a map.",
    "And why would anybody dig a canal through one?",
    "Name the two that every ship's captain knows.",
    "Which of them is older?",
    "Thank you. Say goodbye in one word.",
)
_SYSTEM = "You are a patient teacher of geography. You answer briefly and you never make things up."
# Two SGLangs that start on two cores need a minute or two.
_READY_TIMEOUT_S = {"torch": 120.0, "sglang": 600.0}
_HEADINGS = (
    "turn",
    "decode rank",
    "plan",
    "prompt tokens",
    "decode_prefix_len",
    "KV moved",
    "KV saved",
    "TTFT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Hold a conversation of several turns through a whole cluster on this machine."""

    turns: int = setting(5, "turns of the conversation, at most five")
    max_tokens: int = setting(40, "tokens per answer")
    transport: str = setting("nixl", "nixl or local")
    engine: Literal["torch", "sglang"] = setting("torch", "what computes")
    logs: bool = setting(False, "show the services' logs")


def run(argv: list[str]) -> int:
    config = load(DemoConfig, argv, prog="isthmus demo")
    return asyncio.run(_demo(config))


async def _demo(config: DemoConfig) -> int:
    with tempfile.TemporaryDirectory(prefix="isthmus-demo-") as folder:
        model, log_path = Path(folder) / "model", Path(folder) / "demo.log"
        print("making a small random model; its answers are noise, its KV is real")
        make_model(model)
        shape = Shape(
            model=model,
            data_dir=Path(folder) / "etcd",
            rank_flags=_rank_flags(config),
            ready_timeout_s=_READY_TIMEOUT_S[config.engine],
            common_flags=("--index-block=16",),
            # The point is to see KV cross: left to itself the router computes such short tails on decode.
            router_flags=("--plans=remote",),
        )
        print("starting etcd, 1 router, 1 prefill rank, 2 decode ranks")
        with log_path.open("w") as log_file:

            def show_line(name: str, line: str) -> None:
                print(f"{name:<8}| {line}", file=sys.stderr if config.logs else log_file, flush=True)

            async with (
                LocalCluster(shape, show_line) as cluster,
                channels.open_channel(cluster.router_endpoint()) as channel,
            ):
                await _converse(channel, config)
    return 0


def _rank_flags(config: DemoConfig) -> tuple[str, ...]:
    flags = (f"--engine={config.engine}", f"--transport={config.transport}", "--page-size=16")
    if config.engine == "sglang":
        return (
            *flags,
            "--kv-pages=512",
            "--max-running-requests=8",
            "--engine-arg=--num-reserved-decode-tokens=64",
        )
    return (*flags, "--kv-pages=1024")


async def _converse(channel: grpc.aio.Channel, config: DemoConfig) -> None:
    rows = []
    messages = [generation_pb2.ChatMessage(role="system", content=_SYSTEM)]
    for turn, question in enumerate(_QUESTIONS[: config.turns], start=1):
        messages.append(generation_pb2.ChatMessage(role="user", content=question))
        print(f"\nuser       {question}\nassistant  ", end="")
        answer, ids, finish = await _ask(channel, messages, config.max_tokens)
        # The answer goes back as the ids that were generated, so that its KV is found again.
        messages.append(generation_pb2.ChatMessage(role="assistant", content=answer, token_ids=ids))
        rows.append(_row(turn, finish))
    print("\n\n" + format_table(_HEADINGS, rows, screen.width()))
    print("\ndecode_prefix_len tokens were already on the decode rank: only the rest of the KV crossed.")


async def _ask(
    channel: grpc.aio.Channel, messages: list[generation_pb2.ChatMessage], max_tokens: int
) -> tuple[str, list[int], generation_pb2.Finish]:
    request = generation_pb2.GenerateRequest(
        chat=generation_pb2.Chat(messages=messages, raw_answer=True),
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens),
        conversation_id="demo",
    )
    text, ids, finish = "", [], generation_pb2.Finish()
    async for response in responses(channel, request, timeout_s=60):
        print(response.text, end="", flush=True)
        text += response.text
        ids.extend(response.token_ids)
        if response.HasField("finish"):
            finish = response.finish
    return text, ids, finish


def _row(turn: int, finish: generation_pb2.Finish) -> tuple[object, ...]:
    usage, placement = finish.usage, finish.placement
    return (
        turn,
        f"{placement.decode.worker}/{placement.decode.rank}",
        common_pb2.Plan.Name(placement.plan).removeprefix("PLAN_").lower(),
        usage.prompt_tokens,
        usage.decode_prefix_len,
        format_bytes(usage.kv_bytes_moved),
        format_bytes(usage.kv_bytes_saved),
        f"{1e3 * finish.stages.first_token_s:.1f} ms",
    )
