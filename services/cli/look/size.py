"""`isthmus size`: how much KV for how many conversations."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from services.cli.table import format_bytes
from services.model.context_length import context_tokens
from services.model.sizing import KvShape, Pool, kv_dtype, kv_shape
from services.model.weights import weights
from services.settings.flags import Bounds, check_bounds, load, setting
from services.values.errors import ConfigError

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeConfig:
    """Tell how many pages of KV a rank needs, from a checkpoint's config.json; nothing is loaded.

    With --gpu-gib it tells whether weights, pool and what is set aside fit; exit code 1: they do not.
    """

    model: Path = setting(help="directory of the checkpoint, or its config.json")
    context_tokens: int = setting(
        4096, "tokens of a conversation, answers included", bounds=Bounds(at_least=1)
    )
    conversations: int = setting(
        64, "conversations whose KV is to stay, running or idle", bounds=Bounds(at_least=1)
    )
    concurrency: int = setting(0, "of those, how many run at once: so many must fit")
    ranks: int = setting(1, "decode DP ranks that share them", bounds=Bounds(at_least=1))
    tp_size: int = setting(1, "GPUs that share a rank's KV heads", bounds=Bounds(at_least=1))
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = setting(
        None, "of the KV; default: the checkpoint's"
    )
    page_size: int = setting(64, "the ranks' --page-size", bounds=Bounds(at_least=1))
    pool_gib: float | None = setting(
        None, "GiB that each GPU has for KV: tell how many conversations it holds", bounds=Bounds(above=0)
    )
    gpu_gib: float | None = setting(
        None,
        "GiB of a GPU, or of what a rank on the CPU may take: tell whether all fits",
        bounds=Bounds(above=0),
    )
    kv_pages: int | None = setting(
        None,
        "with it, the ranks' --kv-pages; default: what the conversations need",
        bounds=Bounds(at_least=1),
    )
    dp_attention_size: int = setting(
        1,
        "with it, DP ranks that share all weights but attention's (DP attention)",
        bounds=Bounds(at_least=1),
    )
    reserve_gib: float | None = setting(
        None,
        "with it, GiB for activations, graphs and the runtime; default: a tenth",
        bounds=Bounds(at_least=0),
    )
    weights_gib: float | None = setting(
        None,
        "with it, GiB of weights on each GPU; default: what the architecture comes to",
        bounds=Bounds(above=0),
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if not 0 <= self.concurrency <= self.conversations:
            raise ConfigError("--concurrency cannot be more than --conversations, nor negative")


def run(argv: list[str]) -> int:
    config = load(SizeConfig, argv, prog="isthmus size")
    checkpoint = _read(config.model)
    lines = report(config, checkpoint)
    fit = None if config.gpu_gib is None else fit_of(config, checkpoint, config.gpu_gib)
    print("\n".join(lines if fit is None else [*lines, *fit.lines]))
    return 1 if fit is not None and fit.missing_bytes > 0 else 0


@dataclass(frozen=True, slots=True)
class Fit:
    """What a GPU must hold."""

    weights_bytes: float
    kv_pages: int
    page_bytes: int
    reserve_bytes: float
    memory_bytes: float

    @property
    def missing_bytes(self) -> float:
        used = self.weights_bytes + self.kv_pages * self.page_bytes + self.reserve_bytes
        return used - self.memory_bytes

    @property
    def lines(self) -> list[str]:
        missing = self.missing_bytes
        pages = int((self.kv_pages * self.page_bytes - missing) // self.page_bytes)
        most = f"--kv-pages={pages} would fit" if pages > 0 else "the weights alone are too much"
        verdict = (
            f"{format_bytes(-missing)} left" if missing <= 0 else f"{format_bytes(missing)} missing: {most}"
        )
        return [
            f"weights            {format_bytes(self.weights_bytes)}",
            f"pool               {self.kv_pages} pages, {format_bytes(self.kv_pages * self.page_bytes)}",
            f"set aside          {format_bytes(self.reserve_bytes)}",
            f"{f'of {format_bytes(self.memory_bytes)}'.ljust(18)} {verdict}",
        ]


def fit_of(config: SizeConfig, checkpoint: dict[str, Any], gpu_gib: float) -> Fit:
    """On each GPU of a rank. Raises ConfigError as weights, kv_shape and kv_dtype."""
    pool = _pool(config, checkpoint)
    own = config.weights_gib
    return Fit(
        weights(checkpoint).bytes_per_gpu(config.tp_size, config.dp_attention_size)
        if own is None
        else own * _GIB,
        config.kv_pages or pool.pages_for(config.conversations, config.ranks),
        pool.page_bytes,
        (gpu_gib / 10 if config.reserve_gib is None else config.reserve_gib) * _GIB,
        gpu_gib * _GIB,
    )


def _pool(config: SizeConfig, checkpoint: dict[str, Any]) -> Pool:
    dtype = config.dtype or kv_dtype(checkpoint)
    token_bytes = kv_shape(checkpoint).token_bytes(dtype, config.tp_size)
    return Pool(token_bytes, config.page_size, config.context_tokens)


def report(config: SizeConfig, checkpoint: dict[str, Any]) -> list[str]:
    """Lines for people. Raises ConfigError as kv_shape and kv_dtype."""
    shape, dtype = kv_shape(checkpoint), config.dtype or kv_dtype(checkpoint)
    pool = _pool(config, checkpoint)
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
