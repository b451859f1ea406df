"""`isthmus check` asks whether a cluster finds a conversation's KV again; `helm test` runs it.

`isthmus check DIR` asks a checkpoint instead: checkpoint_report.py.
"""

import asyncio
import random
import sys
from dataclasses import dataclass

import grpc

from services.cli import screen
from services.cli.client import ClientConfig, key_metadata, responses
from services.cli.look import checkpoint_report
from services.cli.table import format_bytes, format_table
from services.settings.flags import load, setting
from services.values.errors import ConfigError, DeadlineExceeded, PeerFailed, Unavailable
from services.wire.isthmus.v1 import common_pb2, generation_pb2

_WORDS = ("canal", "coast", "current", "depth", "isthmus", "lock", "pilot", "sand", "ship", "tide")
_HEADINGS = ("turn", "decode rank", "plan", "prompt tokens", "decode_prefix_len", "KV moved", "KV saved")
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig(ClientConfig):
    """Send a conversation of two turns; exit code 1 unless the second finds the first one's KV.

    Given a directory (`isthmus check DIR`) it looks at a checkpoint instead.
    """

    words: int = setting(200, "words of the first prompt; it must fill a page")
    max_tokens: int = setting(8, "tokens per answer")
    timeout_s: float = setting(120.0, "seconds for a cluster that is starting to become ready, and to answer")

    def __post_init__(self) -> None:
        if self.words < 1 or self.max_tokens < 1:
            raise ConfigError("--words and --max-tokens must be 1 or more")


def run(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        return checkpoint_report.run(argv)
    config = load(CheckConfig, argv, prog="isthmus check")
    return asyncio.run(check(config, random.SystemRandom()))


async def check(config: CheckConfig, rng: random.Random) -> int:
    # It is drawn anew each time: the first turn of a second check must not find the first check's KV.
    conversation_id = f"check-{rng.getrandbits(64):016x}"
    prompt = " ".join(rng.choices(_WORDS, k=config.words))
    try:
        async with config.open_channel() as channel, asyncio.timeout(config.timeout_s):
            answer, first = await _first_answer(channel, config, prompt, conversation_id)
            _, second = await _ask(channel, config, f"{prompt}{answer} And then?", conversation_id)
    except TimeoutError:
        raise DeadlineExceeded(f"no two answers within {config.timeout_s:g} s") from None
    print(format_table(_HEADINGS, [_row(1, first), _row(2, second)], screen.width()))
    problem = verdict(first, second)
    print(problem or "the second turn found the first one's KV", file=sys.stderr if problem else sys.stdout)
    return 1 if problem else 0


def verdict(first: generation_pb2.Finish, second: generation_pb2.Finish) -> str:
    """Say what is wrong with how the second turn was served; "" when nothing is."""
    if second.usage.decode_prefix_len:
        return ""
    before = (first.placements[-1] if first.placements else first.placement).decode  # It ended there.
    after = second.placement.decode
    if (before.worker, before.rank) != (after.worker, after.rank):
        return "the second turn went to another decode rank: `isthmus explain` tells the prices"
    return "the decode rank lacks the first turn's KV: is its cache on, and the prompt longer than a page?"


async def _first_answer(
    channel: grpc.aio.Channel, config: CheckConfig, prompt: str, conversation_id: str
) -> tuple[str, generation_pb2.Finish]:
    while True:
        try:
            return await _ask(channel, config, prompt, conversation_id)
        except (Unavailable, PeerFailed) as error:
            print(f"not ready: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(_RETRY_S)


async def _ask(
    channel: grpc.aio.Channel, config: CheckConfig, prompt: str, conversation_id: str
) -> tuple[str, generation_pb2.Finish]:
    request = generation_pb2.GenerateRequest(
        text=prompt,
        sampling=common_pb2.SamplingParams(temperature=0, max_tokens=config.max_tokens, ignore_eos=True),
        conversation_id=conversation_id,
    )
    text, finish = "", generation_pb2.Finish()
    metadata = key_metadata(config.api_key_file)
    async for response in responses(channel, request, metadata=metadata, router=config.router):
        text += response.text
        if response.HasField("finish"):
            finish = response.finish
    return text, finish


def _row(turn: int, finish: generation_pb2.Finish) -> tuple[object, ...]:
    usage, decode = finish.usage, finish.placement.decode
    return (
        turn,
        f"{decode.worker}/{decode.rank}",
        common_pb2.Plan.Name(finish.placement.plan).removeprefix("PLAN_").lower(),
        usage.prompt_tokens,
        usage.decode_prefix_len,
        format_bytes(usage.kv_bytes_moved),
        format_bytes(usage.kv_bytes_saved),
    )
