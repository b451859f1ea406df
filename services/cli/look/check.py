"""`isthmus check` tests whether a cluster finds a conversation's KV again; `helm test` runs it.

`isthmus check DIR` examines a checkpoint instead: what its layers keep, in how many bytes, and which engine
serves it.
"""

import asyncio
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc

from services.cli import screen
from services.cli.look.size import carried_bytes, read_config, tail_bytes
from services.cli.router_client import MODEL_NAME_HELP, ClientConfig, key_metadata, responses
from services.cli.table import TURN_HEADINGS, fold, format_bytes, format_rank, format_table, turn_row
from services.engine.choose import check_checkpoint
from services.model.layer_groups import LayerGroups, RecurrentGroup, draft_groups, layer_groups, text_config
from services.model.model_config import ITEM_BYTES, context_tokens, kv_dtype
from services.model.quantization import is_quantized, quantization_of
from services.settings.flags import Bounds, check_bounds, load, setting
from services.settings.named_models import MODEL_HELP, resolved
from services.values.errors import ConfigError, DeadlineExceeded, PeerFailed, Unavailable
from services.values.kv import GroupKind
from services.wire.isthmus.v1 import common_pb2, generation_pb2

_WORDS = ("canal", "coast", "current", "depth", "isthmus", "lock", "pilot", "sand", "ship", "tide")
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig(ClientConfig):
    """Send a conversation of two turns; exit code 1 unless the second finds the first one's KV.

    With a directory (`isthmus check DIR`) it examines a checkpoint instead.
    """

    words: int = setting(200, "words of the first prompt; it must fill a page", bounds=Bounds(at_least=1))
    max_tokens: int = setting(8, "tokens per answer", bounds=Bounds(at_least=1))
    model: str = setting("", MODEL_NAME_HELP)
    timeout_s: float = setting(120.0, "seconds for a cluster that is starting to become ready, and to answer")

    def __post_init__(self) -> None:
        check_bounds(self)


def run(argv: list[str]) -> int:
    if argv and not argv[0].startswith("-"):
        return run_on_checkpoint(argv)
    config = load(CheckConfig, argv, prog="isthmus check")
    return asyncio.run(check(config, random.SystemRandom()))


async def check(config: CheckConfig, rng: random.Random) -> int:
    # A new id is drawn each time: the first turn of a second check must not find the first check's KV.
    conversation_id = f"check-{rng.getrandbits(64):016x}"
    prompt = " ".join(rng.choices(_WORDS, k=config.words))
    try:
        async with config.open_channel() as channel, asyncio.timeout(config.timeout_s):
            answer, first = await _first_answer(channel, config, prompt, conversation_id)
            _, second = await _ask(channel, config, f"{prompt}{answer} And then?", conversation_id)
    except TimeoutError:
        raise DeadlineExceeded(f"no two answers within {config.timeout_s:g} s") from None
    print(format_table(TURN_HEADINGS, [turn_row(1, first), turn_row(2, second)], screen.width()))
    problem = verdict(first, second)
    print(problem or "the second turn found the first one's KV", file=sys.stderr if problem else sys.stdout)
    return 1 if problem else 0


def verdict(first: generation_pb2.Finish, second: generation_pb2.Finish) -> str:
    if second.usage.decode_prefix_len:
        return ""
    # The first turn ended on this rank.
    before = (first.placements[-1] if first.placements else first.placement).decode
    after = second.placement.decode
    if format_rank(before) != format_rank(after):
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
        model=config.model,
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


_GROUP_HEADINGS = ("group", "layers", "what is kept", "bytes")
_ENGINES = ("torch", "sglang")
# These model types fail the torch engine's check when it starts: a config.json does not show what a model's
# code does (tests/engine/torch/model/check/test_self_check.py).
_FAIL_AT_START = {"jamba": "its scan begins each chunk from zeros"}
_NAMES = {
    GroupKind.FULL_ATTENTION: "full attention",
    GroupKind.SLIDING_WINDOW: "sliding window",
    GroupKind.CHUNKED_WINDOW: "chunked window",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Tell what the layers of a checkpoint keep of a sequence, and which engine serves it.

    Exit code 1: none does.
    """

    directory: Path = setting(help=MODEL_HELP, positional=True)
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = setting(
        None, "of the KV; default: the checkpoint's"
    )
    page_size: int = setting(64, "the ranks' --page-size, on whose borders tails begin", bounds=Bounds(1))
    draft_model: Path | None = setting(None, "a checkpoint that is to draft for it: the ranks' --draft-model")

    def __post_init__(self) -> None:
        check_bounds(self)


def run_on_checkpoint(argv: list[str]) -> int:
    config = resolved(load(CheckpointConfig, argv, prog="isthmus check DIR"), weights=True)
    checkpoint, width = read_config(config.directory), screen.width()
    try:
        print("\n".join(report(config, checkpoint, width)))
    except ConfigError as error:  # An engine may still know the model, or explain why it refuses it.
        print(error)
    refusals = {engine: _refusal(engine, config.directory, checkpoint) for engine in _ENGINES}
    for engine, refusal in refusals.items():
        answer = f"refuses it: {refusal}" if refusal else _served(engine, config, checkpoint)
        print(fold(f"{engine.ljust(8)}{answer}", width, indent=8))
    return 1 if all(refusals.values()) else 0


def report(config: CheckpointConfig, checkpoint: Mapping[str, Any], width: int | None = None) -> list[str]:
    dtype, groups = config.dtype or kv_dtype(checkpoint), layer_groups(checkpoint)
    lines = [", ".join(_title(checkpoint, dtype)), ""]
    lines += format_table(_GROUP_HEADINGS, list(_rows(groups, dtype, config.page_size)), width).splitlines()
    draft = _draft(config.draft_model, checkpoint) if config.draft_model is not None else []
    sentences = [_moved(groups, dtype, config.page_size), *draft]
    return [*lines, "", *(fold(line, width) for line in sentences)]


def _draft(directory: Path, checkpoint: Mapping[str, Any]) -> list[str]:
    draft = read_config(directory)
    groups, dtype = draft_groups(draft, checkpoint), kv_dtype(draft)
    token = format_bytes(groups.whole_token_bytes(dtype))
    return [f"Of the draft model {token} more for each token ({dtype}), where prefill ranks have it, too."]


def _title(checkpoint: Mapping[str, Any], dtype: str) -> Iterator[str]:
    yield str(next(iter(checkpoint.get("architectures") or ()), checkpoint.get("model_type")))
    yield dtype
    if is_quantized(checkpoint):
        yield f"weights quantized ({_method(checkpoint)})"
    try:
        yield f"{context_tokens(text_config(checkpoint))} tokens of context"
    except (KeyError, TypeError, ValueError, AttributeError):
        yield "a context of unknown length"


def _method(checkpoint: Mapping[str, Any]) -> str:
    try:
        quantization = quantization_of(checkpoint)
        return quantization.method if quantization else "otherwise"
    except ConfigError:  # The engines' own refusals explain this.
        return "otherwise"


def _rows(groups: LayerGroups, dtype: str, page_size: int) -> Iterator[tuple[object, ...]]:
    full = groups.full
    seen = f" (of which a layer sees {groups.masked_window})" if groups.masked_window else ""
    token = f"{format_bytes(full.token_bytes(dtype))} a token"
    yield _NAMES[full.kind], len(full.layer_ids), f"{full.heads} of every token{seen}", token
    for window in groups.windows:
        kept = f"{window.heads} of the last {window.window} tokens"
        if window.kind is GroupKind.CHUNKED_WINDOW:
            kept = f"{window.heads} since the last multiple of {window.window} tokens"
        tail = f"up to {format_bytes(tail_bytes(window, dtype, page_size))} a tail"
        yield _NAMES[window.kind], len(window.layer_ids), kept, tail
    if groups.recurrent:
        yield _recurrent_row(groups.recurrent, full.token_bytes(dtype), dtype)


def _recurrent_row(recurrent: RecurrentGroup, token_bytes: int, dtype: str) -> tuple[object, ...]:
    layer = recurrent.layer
    convolution = f"{format_bytes(layer.convolution * ITEM_BYTES[dtype])} of convolution"
    rest = layer.size_bytes(0)
    kept = f"{convolution}, {format_bytes(rest)} in float32, a layer" if rest else f"{convolution} a layer"
    size = recurrent.state_bytes(dtype)
    bytes_ = f"{format_bytes(size)} a state, as {size / token_bytes:.0f} tokens of full attention"
    return "recurrent", len(recurrent.layer_ids), kept, bytes_


def _moved(groups: LayerGroups, dtype: str, page_size: int) -> str:
    token = format_bytes(groups.full.token_bytes(dtype))
    if not groups.carries:
        return f"From prefill to decode: {token} for each token of the delta, and nothing else."
    carried = format_bytes(carried_bytes(groups, dtype, page_size))
    return f"From prefill to decode: {token} for each token of the delta, and {carried} however short it is."


def _served(engine: str, config: CheckpointConfig, checkpoint: Mapping[str, Any]) -> str:
    if engine == "torch":
        return "serves it, if at start the model in chunks and token by token is the model in one pass"
    groups, serves = layer_groups(checkpoint), "serves it"
    if is_quantized(checkpoint):
        serves = "may serve it: SGLang decides about quantized weights"
    if groups.recurrent:
        return f"{serves}; its decode finds a prefix only where it kept a state (docs/models.md)"
    if groups.windows:
        token = format_bytes(groups.whole_token_bytes(config.dtype or kv_dtype(checkpoint)))
        return f"{serves}, windows kept whole: {token} a token (docs/models.md)"
    return serves


def _refusal(engine: str, directory: Path, checkpoint: Mapping[str, Any]) -> str | None:
    try:
        is_quantized(checkpoint)  # It raises ConfigError if the quantization is not an object.
        check_checkpoint(engine, directory)
    except (ConfigError, Unavailable) as error:
        return str(error)
    fault = _FAIL_AT_START.get(str(checkpoint.get("model_type")))
    return f"it fails the check at start: {fault}" if engine == "torch" and fault else None
