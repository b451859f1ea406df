"""`isthmus explain`: where a prompt would go, and the price of every candidate by its terms."""

import asyncio
import sys
from dataclasses import dataclass

import grpc

from services import rpc
from services.cli.client import ClientConfig
from services.cli.table import format_table
from services.config import load, setting
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig(ClientConfig):
    """Show where a prompt (--prompt, or standard input) would go and why; nothing is generated."""

    prompt: str = setting("", "the prompt; default: standard input")
    conversation: str = setting("", "conversation id")


def run(argv: list[str]) -> int:
    config = load(ExplainConfig, argv, prog="isthmus explain")
    return asyncio.run(_explain(config, config.prompt or sys.stdin.read()))


async def _explain(config: ExplainConfig, prompt: str) -> int:
    request = generation_pb2.GenerateRequest(text=prompt, conversation_id=config.conversation)
    async with config.open_channel() as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        try:
            answer = await stub.Explain(generation_pb2.ExplainRequest(request=request), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from(error) from error
    print(f"{answer.prompt_tokens} prompt tokens; chosen: {answer.reason}")
    if answer.degraded:
        print(f"degraded, by load alone: {answer.degraded}")
    print(format_candidates(answer))
    return 0


def format_candidates(answer: generation_pb2.ExplainResponse) -> str:
    """Cheapest first; prices in milliseconds."""
    names = list(dict.fromkeys(term.name for c in answer.candidates for term in c.terms))
    headings = ["", "decode", "hit", "prefill", "hit", "plan", *names, "total ms", "note"]
    return format_table(headings, [_row(candidate, names) for candidate in answer.candidates])


def _row(candidate: generation_pb2.Candidate, names: list[str]) -> list[object]:
    terms = {term.name: f"{1e3 * term.seconds:.2f}" for term in candidate.terms}
    note = candidate.excluded or ("pinned" if candidate.pinned else "")
    return [
        "*" if candidate.chosen else "",
        _rank(candidate, "decode"),
        candidate.decode_hit_tokens,
        _rank(candidate, "prefill"),
        candidate.prefill_hit_tokens,
        "" if candidate.excluded else common_pb2.Plan.Name(candidate.plan).removeprefix("PLAN_").lower(),
        *(terms.get(name, "") for name in names),
        "" if candidate.excluded else f"{1e3 * candidate.total_s:.2f}",
        note,
    ]


def _rank(candidate: generation_pb2.Candidate, role: str) -> str:
    rank = candidate.decode if role == "decode" else candidate.prefill
    return f"{rank.worker}/{rank.rank}" if candidate.HasField(role) else "-"
