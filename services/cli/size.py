"""`isthmus size`: how much KV for how many conversations."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.cli.table import format_bytes
from services.config import load, setting
from services.errors import ConfigError
from services.kv.context_length import context_tokens
from services.kv.sizing import KvShape, Pool, kv_dtype, kv_shape

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeConfig:
    """Tell how many pages of KV a rank needs, from a checkpoint's config.json; nothing is loaded."""

    model: Path = setting(help="directory of the checkpoint, or its config.json")
    context_tokens: int = setting(4096, "tokens of a conversation, answers included")
    conversations: int = setting(64, "conversations whose KV is to stay, running or idle")
    concurrency: int = setting(0, "of those, how many run at once: so many must fit")
    ranks: int = setting(1, "decode DP ranks that share them")
    tp_size: int = setting(1, "GPUs that share a rank's KV heads")
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = setting(
        None, "of the KV; default: the checkpoint's"
    )
    page_size: int = setting(64, "the ranks' --page-size")
    pool_gib: float | None = setting(
        None, "GiB that each GPU has for KV: tell how many conversations it holds"
    )

    def __post_init__(self) -> None:
        for name in ("context_tokens", "conversations", "ranks", "tp_size", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.concurrency <= self.conversations:
            raise ConfigError("--concurrency cannot be more than --conversations, nor negative")
        if self.pool_gib is not None and self.pool_gib <= 0:
            raise ConfigError("--pool-gib must be above 0")


def run(argv: list[str]) -> int:
    config = load(SizeConfig, argv, prog="isthmus size")
    print("\n".join(report(config, _read(config.model))))
    return 0


def report(config: SizeConfig, checkpoint: dict[str, Any]) -> list[str]:
    """Lines for people. Raises ConfigError as kv_shape and kv_dtype."""
    shape, dtype = kv_shape(checkpoint), config.dtype or kv_dtype(checkpoint)
    pool = Pool(shape.token_bytes(dtype, config.tp_size), config.page_size, config.context_tokens)
    per_gpu = f" on each of {config.tp_size} GPUs" if config.tp_size > 1 else ""
    lines = [
        f"KV per token       {format_bytes(pool.token_bytes)}{per_gpu}: {shape.num_layers} layers, "
        f"{shape.description}, {dtype}",
        f"a page             {config.page_size} tokens, {format_bytes(pool.page_bytes)}",
        f"a conversation     {config.context_tokens} tokens, {pool.conversation_pages} pages, "
        f"{format_bytes(pool.conversation_pages * pool.page_bytes)}",
        _wanted(config, pool),
    ]
    if config.pool_gib is not None:
        lines.append(_held(config, pool, config.pool_gib))
    return lines + _remarks(config, checkpoint, shape)


def _wanted(config: SizeConfig, pool: Pool) -> str:
    pages = pool.pages_for(config.conversations, config.ranks)
    head = f"{config.conversations} conversations".ljust(18)
    return f"{head} --kv-pages={pages} on each decode rank: {format_bytes(pages * pool.page_bytes)} per GPU"


def _held(config: SizeConfig, pool: Pool, pool_gib: float) -> str:
    pages = pool.pages_in(pool_gib * _GIB)
    held = pool.conversations_in(pages) * config.ranks
    head = f"{pool_gib:g} GiB per GPU".ljust(18)
    text = f"{head} --kv-pages={pages}: {held} conversations on {config.ranks} ranks"
    if held < max(config.concurrency, 1):
        text += f"; too few for {config.concurrency or 1} at once: sequences would be retracted"
    return text


def _remarks(config: SizeConfig, checkpoint: dict[str, Any], shape: KvShape) -> list[str]:
    remarks = []
    if shape.windowed_layers:
        remarks.append(f"{shape.windowed_layers} layers look through a window: they are counted in full")
    stated = checkpoint.get("text_config", checkpoint).get("max_position_embeddings")
    if stated and config.context_tokens > (longest := context_tokens(checkpoint)):
        remarks.append(f"the model's context ends at {longest} tokens")
    return remarks


def _read(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return content
