"""`isthmus demo` starts a cluster on this machine, sends a conversation, and shows in a table what moved."""

import asyncio
import sys
import tempfile
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import grpc

from services.cli import screen
from services.cli.local.local_cluster import LocalCluster, Shape
from services.cli.model.fetch_model import ensure_cached
from services.cli.model.make_model import make_model
from services.cli.router_client import responses
from services.cli.table import TURN_HEADINGS, format_table, turn_row
from services.net import channels
from services.settings.flags import load, refusing, setting
from services.settings.named_models import KNOWN, resolved
from services.values.errors import Unavailable
from services.wire.isthmus.v1 import common_pb2, generation_pb2

_TEXT = (
    "The Corinth Canal cuts through the Isthmus of Corinth in Greece. It joins the Gulf of Corinth in the "
    "west to the Saronic Gulf in the east, and spares ships a voyage of 700 kilometres around the "
    "Peloponnese. It was dug between 1881 and 1893. It is 6.4 kilometres long, but only 24.6 metres wide, "
    "and its walls of rock rise 79 metres above the water. Most modern ships are too wide for it, and "
    "landslides have closed it many times, so that today it is used mainly by tourist boats."
)
_RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Talk:
    system: str
    questions: tuple[str, ...]
    max_tokens: int
    kv_pages: int
    warning: str = ""


# With greedy decoding a small model soon repeats itself in small talk, but not in questions about a text.
_ON_A_TEXT = Talk(
    "You answer questions about a text, in one short sentence.",
    (
        f"Read this text and answer my questions about it.\n\n{_TEXT}\n\nWhere is the canal?",
        "When was it dug?",
        "How long and how wide is it?",
        "Who uses it today?",
    ),
    max_tokens=60,
    kv_pages=128,
)
_SMALL_TALK = Talk(
    "You are a patient teacher of geography. You answer briefly and you never make things up.",
    (
        "What is an isthmus? Answer as if I had never seen a map.",
        "And why would anybody dig a canal through one?",
        "Name the two that every ship's captain knows.",
        "Which of them is older?",
        "Thank you. Say goodbye in one word.",
    ),
    max_tokens=40,
    kv_pages=1024,
    warning="The model is random: its answers are noise, what moves is real.",
)
# Two SGLang engines need a minute or two to start on two cores.
_READY_TIMEOUT_S = {"torch": 300.0, "sglang": 600.0}
_DEFAULT = KNOWN["smollm2"]
_SPEAKER, _WIDEST = 11, 110  # Both are numbers of columns.


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Hold a conversation of several turns through a whole cluster on this machine."""

    model: str = setting(
        "",
        f"a checkpoint's directory, a name as for `isthmus up`, or {_RANDOM}: one that answers noise; "
        "default: smollm2, or random where no package source has that, or SGLang computes",
    )
    turns: int = setting(5, "turns of the conversation, at most")
    max_tokens: int | None = setting(
        None, "tokens per answer, at most; default: 60, and 40 of a random model"
    )
    transport: str = setting("nixl", "nixl or local")
    engine: Literal["torch", "sglang"] = setting("torch", "what computes")
    logs: bool = setting(False, "show the services' logs")


def run(argv: list[str]) -> int:
    config = load(DemoConfig, argv, prog="isthmus demo")
    with (
        refusing("isthmus demo"),
        tempfile.TemporaryDirectory(prefix="isthmus-demo-") as folder,
    ):
        model, talk = _chosen(config, Path(folder))
        return asyncio.run(_demo(config, model, talk, Path(folder)))


def _chosen(config: DemoConfig, folder: Path) -> tuple[Path, Talk]:
    name = config.model or (_DEFAULT.name if config.engine == "torch" else _RANDOM)
    try:
        if name != _RANDOM:
            ensure_cached(name, print)
            named = resolved(_Named(name), weights=True, report=print)
            known = KNOWN.get(name)
            return Path(named.model), replace(_ON_A_TEXT, warning=known.warning if known else "")
    except Unavailable as error:
        if config.model:
            raise
        print(f"{error}; so a random model answers instead")
    print("making a small random model; its answers are noise, its KV is real")
    make_model(folder / "model")
    return folder / "model", _SMALL_TALK


@dataclass(frozen=True, slots=True)
class _Named:
    model: str


async def _demo(config: DemoConfig, model: Path, talk: Talk, folder: Path) -> int:
    shape = Shape(
        model=model,
        data_dir=folder / "etcd",
        rank_flags=_rank_flags(config, talk),
        ready_timeout_s=_READY_TIMEOUT_S[config.engine],
        common_flags=("--index-block=16",),
        # The demo shows transfers of KV; by default the router would let decode compute such short tails.
        router_flags=("--plans=remote",),
    )
    print("starting etcd, 1 router, 1 prefill rank, 2 decode ranks")
    with (folder / "demo.log").open("w") as log_file:

        def show_line(name: str, line: str) -> None:
            print(f"{name:<8}| {line}", file=sys.stderr if config.logs else log_file, flush=True)

        async with (
            LocalCluster(shape, show_line) as cluster,
            channels.open_channel(cluster.router_endpoint()) as channel,
        ):
            await _converse(channel, config, talk)
    return 0


def _rank_flags(config: DemoConfig, talk: Talk) -> tuple[str, ...]:
    flags = (f"--engine={config.engine}", f"--transport={config.transport}", "--page-size=16")
    if config.engine == "sglang":
        return (
            *flags,
            "--kv-pages=512",
            "--max-running-requests=8",
            "--engine-arg=--num-reserved-decode-tokens=64",
        )
    return (*flags, f"--kv-pages={talk.kv_pages}")


async def _converse(channel: grpc.aio.Channel, config: DemoConfig, talk: Talk) -> None:
    rows = []
    messages = [generation_pb2.ChatMessage(role="system", content=talk.system)]
    for turn, question in enumerate(talk.questions[: config.turns], start=1):
        messages.append(generation_pb2.ChatMessage(role="user", content=question))
        print(f"\nuser       {_indented(question)}\nassistant  ", end="")
        answer, ids, finish = await _ask(channel, messages, config.max_tokens or talk.max_tokens)
        # The request contains the generated token ids, so that the answer's KV is found again.
        messages.append(generation_pb2.ChatMessage(role="assistant", content=answer, token_ids=ids))
        rows.append((*turn_row(turn, finish), f"{1e3 * finish.stages.first_token_s:.1f} ms"))
    print("\n\n" + format_table((*TURN_HEADINGS, "TTFT"), rows, screen.width()))
    print("\ndecode_prefix_len tokens were already on the decode rank: only the rest of the KV crossed.")
    print(*filter(None, [talk.warning]))


def _indented(text: str) -> str:
    indent = " " * _SPEAKER
    width = min(screen.width() or _WIDEST, _WIDEST)
    lines = (
        textwrap.fill(line, width, initial_indent=indent, subsequent_indent=indent)
        for line in text.split("\n")
    )
    return "\n".join(lines).strip()


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
