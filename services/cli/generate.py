"""`isthmus generate` streams the answer to one prompt."""

import asyncio
import sys
from dataclasses import dataclass

from services.cli.router_client import (
    MAX_TOKENS_BOUNDS,
    MODEL_NAME_HELP,
    SEED_BOUNDS,
    ClientConfig,
    given_prompt,
    key_metadata,
    responses,
)
from services.cli.table import format_bytes, format_plan, format_rank, format_reason
from services.settings.flags import check_bounds, load, setting
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1 import common_pb2, generation_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(ClientConfig):
    """Send a prompt (TEXT, or standard input) to a router and stream the answer."""

    prompt: str = setting("", "the prompt; default: standard input", bare="TEXT")
    model: str = setting("", MODEL_NAME_HELP)
    conversation: str = setting("", "conversation id: its turns stay on one decode rank")
    chat: bool = setting(False, "send the prompt as a user's message through the chat template")
    max_tokens: int = setting(128, "tokens to generate at most", bounds=MAX_TOKENS_BOUNDS)
    temperature: float | None = setting(None, "0 is greedy; default: the model's own")
    seed: int | None = setting(None, "makes sampling repeatable", bounds=SEED_BOUNDS)
    usage: bool = setting(False, "print at the end what was reused, computed and moved")
    timeout_s: float = setting(120.0, "seconds after which the answer is given up")

    def __post_init__(self) -> None:
        check_bounds(self)


def run(argv: list[str]) -> int:
    config = load(GenerateConfig, argv, prog="isthmus generate")
    return asyncio.run(_generate(config, given_prompt(config.prompt)))


async def _generate(config: GenerateConfig, prompt: str) -> int:
    if not prompt:
        raise InvalidRequest("TEXT is empty, and so is standard input")
    metadata = key_metadata(config.api_key_file)
    async with config.open_channel() as channel:
        request = _request(config, prompt)
        async for response in responses(channel, request, config.timeout_s, metadata, config.router):
            print(response.text, end="", flush=True)
            if response.HasField("finish"):
                print()
                if config.usage:
                    _print_usage(response.finish)
    return 0


def _request(config: GenerateConfig, prompt: str) -> generation_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(
        temperature=config.temperature, max_tokens=config.max_tokens, seed=config.seed
    )
    request = generation_pb2.GenerateRequest(
        model=config.model, sampling=sampling, conversation_id=config.conversation
    )
    if config.chat:
        request.chat.messages.add(role="user", content=prompt)
        request.chat.raw_answer = True  # The raw answer includes thinking.
    else:
        request.text = prompt
    return request


def _print_usage(finish: generation_pb2.Finish) -> None:
    first_token = f"first token after {1e3 * finish.stages.first_token_s:.1f} ms"
    used = _used(finish.placement, finish.usage)
    print(f"{used}; {first_token}; ended by {format_reason(finish)}", file=sys.stderr)
    if len(finish.placements) < 2:
        return
    for number, placement in enumerate(finish.placements, start=1):
        print(f"placement {number}: {_used(placement, placement.usage)}", file=sys.stderr)
    totals = finish.totals
    print(
        f"in all: {totals.computed_tokens} computed, KV moved {format_bytes(totals.kv_bytes_moved)}, "
        f"saved {format_bytes(totals.kv_bytes_saved)}",
        file=sys.stderr,
    )


def _used(placement: generation_pb2.Placement, usage: generation_pb2.Usage) -> str:
    where = f"{format_rank(placement.decode)}, plan {format_plan(placement)}"
    return (
        f"{usage.prompt_tokens} prompt tokens on {where}: "
        f"{usage.reused_tokens} reused{_pulled(placement, usage)}, "
        f"{usage.computed_tokens} computed, decode_prefix_len {usage.decode_prefix_len}, "
        f"KV moved {format_bytes(usage.kv_bytes_moved)}{_fixed_cost(usage)}, "
        f"saved {format_bytes(usage.kv_bytes_saved)}; {usage.completion_tokens} generated{_drafted(usage)}"
    )


def _pulled(placement: generation_pb2.Placement, usage: generation_pb2.Usage) -> str:
    if usage.pulled_tokens:
        size = format_bytes(usage.pulled_bytes)
        return f" ({usage.pulled_tokens} pulled from {format_rank(placement.source)}, {size})"
    return f" (nothing pulled: {placement.pull_refused})" if placement.pull_refused else ""


def _drafted(usage: generation_pb2.Usage) -> str:
    drafted = usage.drafted_tokens
    return f", {usage.accepted_draft_tokens} of {drafted} drafts were right" if drafted else ""


def _fixed_cost(usage: generation_pb2.Usage) -> str:
    by_kind = [f"{kind} {format_bytes(size)}" for kind, size in sorted(usage.carried_bytes.items())]
    return f" (of it {', '.join(by_kind)})" if by_kind else ""
