"""`isthmus size` computes how much KV, and how many states, a number of conversations need.

It reads a config.json, and counts the most bytes that a sequence can need besides the pages of full
attention.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from services.cli import screen
from services.cli.table import fold, format_bytes
from services.engine.engine_config import TIER_BOUNDS
from services.engine.paged.shell.tiers import TierPlace, check_room, tier_places
from services.kv.tails import PoolSizes, units_at, units_for
from services.model import lora
from services.model.layer_groups import AttentionGroup, LayerGroups, draft_groups, layer_groups, text_config
from services.model.model_config import Pool, context_tokens, kv_dtype
from services.model.quantization import MODELOPT_FILE, is_quantized, with_modelopt
from services.model.weights import weights
from services.settings.flags import Bounds, check_bounds, load, setting
from services.settings.named_models import MODEL_HELP, resolved
from services.tier.slab import SlabShape
from services.values.errors import ConfigError


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json, given its path or its directory, and add ModelOpt's quantization from the file
    beside it. Raises ConfigError.
    """
    file = path / "config.json" if path.is_dir() else path
    beside = file.with_name(MODELOPT_FILE)
    config = _read(file)
    return with_modelopt(config, _read(beside)) if beside.is_file() else config


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return content


_CHUNK_SIZE = PoolSizes().chunk_size


def most_tail_pages(window: AttentionGroup, page_size: int) -> int:
    """Return the most pages of a windowed group that a sequence needs to continue, over all positions."""
    group = window.in_layout("float32", page_size)
    # From `window` on tails are full; they repeat every `window` and every `page_size` tokens.
    positions = range(window.window, window.window + max(window.window, page_size))
    return max(units_at(group, position, page_size) for position in positions)


def running_pages(window: AttentionGroup, page_size: int, running: int) -> int:
    return units_for(window.in_layout("float32", page_size), page_size, _CHUNK_SIZE, running)


def tail_bytes(window: AttentionGroup, dtype: str, page_size: int, tp_size: int = 1) -> int:
    return most_tail_pages(window, page_size) * page_size * window.token_bytes(dtype, tp_size)


def carried_bytes(groups: LayerGroups, dtype: str, page_size: int, tp_size: int = 1) -> int:
    """Return the bytes of tails and state, which each transfer sends besides its delta."""
    tails = sum(tail_bytes(window, dtype, page_size, tp_size) for window in groups.windows)
    return tails + (groups.recurrent.state_bytes(dtype, tp_size) if groups.recurrent else 0)


@dataclass(frozen=True, slots=True)
class CarriedPools:
    """These pools hold `running` sequences and so many `checkpoints`; sizes are per GPU of a decode rank."""

    groups: LayerGroups
    dtype: str
    page_size: int
    tp_size: int
    running: int
    checkpoints: int

    def window_pages(self, window: AttentionGroup) -> int:
        running = running_pages(window, self.page_size, self.running)
        return running + self.checkpoints * most_tail_pages(window, self.page_size)

    def window_bytes(self, window: AttentionGroup) -> int:
        return self.window_pages(window) * self.page_size * window.token_bytes(self.dtype, self.tp_size)

    @property
    def slots(self) -> int:
        # One slot a sequence is enough: its state at the last border is one of the checkpoints.
        return self.running + self.checkpoints if self.groups.recurrent else 0

    @property
    def slot_bytes(self) -> int:
        recurrent = self.groups.recurrent
        return self.slots * recurrent.state_bytes(self.dtype, self.tp_size) if recurrent else 0

    @property
    def point_bytes(self) -> int:
        """Return the bytes of one checkpoint, with the longest tails."""
        return carried_bytes(self.groups, self.dtype, self.page_size, self.tp_size)

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes + sum(self.window_bytes(window) for window in self.groups.windows)


_GIB = 2**30
_INDEX_BLOCK = 64  # A tier keeps whole blocks of the index.
_BESIDE_BYTES = _GIB  # Python and torch take it on a CPU.
_MEMORY_GIB_PER_S = 6.0  # One core copies so much into a pool (measured; docs/benchmarks.md has tiers' gain).
_LABEL = 19  # Each line's value begins at this column.


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeConfig:
    """Tell how many pages of KV a rank needs, from a checkpoint's config.json; nothing is loaded.

    With --gpu-gib it tells whether weights, pool and what is set aside fit, and the dequantized weights that
    engine torch holds while it starts; exit code 1: they do not.
    """

    model: Path = setting(help=f"{MODEL_HELP}; or its config.json", bare="MODEL")
    context_tokens: int = setting(
        4096, "tokens of a conversation, answers included", bounds=Bounds(at_least=1)
    )
    conversations: int = setting(
        64, "conversations whose KV is to stay, running or idle", bounds=Bounds(at_least=1)
    )
    concurrency: int = setting(0, "how many of those run at once, and so must fit")
    checkpoints: int = setting(
        32,
        "borders at which a rank keeps windows and states, if layers have them",
        bounds=Bounds(at_least=0),
        formerly="resume-points",
    )
    ranks: int = setting(1, "decode DP ranks that share them", bounds=Bounds(at_least=1))
    tp_size: int = setting(1, "GPUs that share a rank's KV heads", bounds=Bounds(at_least=1))
    draft_model: Path | None = setting(
        None, "the ranks' --draft-model: pages hold its KV, too, and its weights count for --gpu-gib"
    )
    engine: Literal["torch", "sglang"] = setting(
        "torch", "what computes: torch holds quantized weights dequantized while it starts"
    )
    dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = setting(
        None, "of the KV; default: the checkpoint's"
    )
    page_size: int = setting(64, "the ranks' --page-size", bounds=Bounds(at_least=1))
    pool_gib: float | None = setting(
        None,
        "GiB for KV on each rank, or on each of its GPUs: compute how many conversations it holds",
        bounds=Bounds(above=0),
    )
    gpu_gib: float | None = setting(
        None,
        "GiB of a GPU, or of a rank's memory on the CPU: check whether everything fits",
        bounds=Bounds(above=0),
    )
    kv_pages: int | None = setting(
        None,
        "with --gpu-gib: the ranks' --kv-pages; default: what the conversations need",
        bounds=Bounds(at_least=1),
    )
    dp_attention_size: int = setting(
        1,
        "with --gpu-gib: DP ranks that share all weights except attention's (DP attention)",
        bounds=Bounds(at_least=1),
    )
    reserve_gib: float | None = setting(
        None,
        "with --gpu-gib: GiB for activations, graphs and the runtime; default: a tenth",
        bounds=Bounds(at_least=0),
    )
    weights_gib: float | None = setting(
        None,
        "with --gpu-gib: GiB of weights on each GPU; default: computed from the architecture",
        bounds=Bounds(above=0),
    )

    lora: tuple[Path, ...] = setting(
        (), "with --gpu-gib: directories of adapters that a rank is to hold at once", split=False
    )
    kv_tier: tuple[str, ...] = setting(
        (), "the ranks' --kv-tier: tell what each holds", split=False, bounds=TIER_BOUNDS
    )
    device: Literal["cpu", "cuda"] = setting(
        "cpu", "with --kv-tier: where the ranks compute; tiers in memory take nothing of a GPU's"
    )
    disk_gib_per_s: float | None = setting(
        None, "with --kv-tier: GiB that a rank reads from files in a second", bounds=Bounds(above=0)
    )
    compute_tokens_per_s: float | None = setting(
        None, "with --kv-tier: prompt tokens that a rank computes in a second", bounds=Bounds(above=0)
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        if not 0 <= self.concurrency <= self.conversations:
            raise ConfigError("--concurrency cannot be more than --conversations, nor negative")


def run(argv: list[str]) -> int:
    config = resolved(load(SizeConfig, argv, prog="isthmus size"), weights=False)
    checkpoint = read_config(config.model)
    lines = report(config, checkpoint)
    fit = None if config.gpu_gib is None else fit_of(config, checkpoint, config.gpu_gib)
    shown = lines if fit is None else [*lines, *fit.lines]
    print("\n".join(fold(line, screen.width(), indent=_LABEL) for line in shown))
    return 1 if fit is not None and not fit.fits else 0


@dataclass(frozen=True, slots=True)
class Fit:
    weights_bytes: float
    kv_pages: int
    page_bytes: int
    carried_bytes: int  # This is the size of the pools of windows and states.
    reserve_bytes: float
    memory_bytes: float
    start_bytes: float = 0.0  # These are weights while a rank starts, if that is more.
    tier_bytes: int = 0  # Tiers in memory are taken at the start.
    adapter_bytes: int = 0

    @property
    def fits(self) -> bool:
        return self.missing_bytes <= 0 and self.missing_at_start <= 0

    @property
    def missing_at_start(self) -> float:
        return self.start_bytes + self.tier_bytes + self.reserve_bytes - self.memory_bytes

    @property
    def missing_bytes(self) -> float:
        pools = self.kv_pages * self.page_bytes + self.carried_bytes + self.tier_bytes + self.adapter_bytes
        return self.weights_bytes + pools + self.reserve_bytes - self.memory_bytes

    @property
    def lines(self) -> list[str]:
        missing = self.missing_bytes
        pages = int((self.kv_pages * self.page_bytes - missing) // self.page_bytes)
        alone = (
            "what is beside the pages is too much" if self.carried_bytes else "the weights alone are too much"
        )
        most = f"--kv-pages={pages} would fit" if pages > 0 else alone
        verdict = (
            f"{format_bytes(-missing)} left" if missing <= 0 else f"{format_bytes(missing)} missing: {most}"
        )
        return [
            f"weights            {format_bytes(self.weights_bytes)}",
            f"pool               {self.kv_pages} pages, {format_bytes(self.kv_pages * self.page_bytes)}",
            *self._carried_line(),
            *([f"tiers in memory    {format_bytes(self.tier_bytes)}"] if self.tier_bytes else []),
            *([f"adapters           {format_bytes(self.adapter_bytes)}"] if self.adapter_bytes else []),
            f"set aside          {format_bytes(self.reserve_bytes)}",
            f"{f'of {format_bytes(self.memory_bytes)}'.ljust(18)} {verdict}",
            *self._start_line(),
        ]

    def _start_line(self) -> list[str]:
        if not self.start_bytes:
            return []
        missing = self.missing_at_start
        verdict = f"{format_bytes(abs(missing))} {'missing' if missing > 0 else 'left'}"
        weights = f"dequantized weights of {format_bytes(self.start_bytes)}"
        return [f"at start           engine torch holds {weights}: {verdict}"]

    def _carried_line(self) -> list[str]:
        size = format_bytes(self.carried_bytes)
        return [f"beside the pages   {size}"] if self.carried_bytes else []


def fit_of(config: SizeConfig, checkpoint: dict[str, Any], gpu_gib: float) -> Fit:
    pool = _pool(config, checkpoint)
    return Fit(
        _weights_bytes(config, checkpoint),
        config.kv_pages or pool.pages_for(config.conversations, config.ranks),
        pool.page_bytes,
        _carried(config, checkpoint).size_bytes,
        (gpu_gib / 10 if config.reserve_gib is None else config.reserve_gib) * _GIB,
        gpu_gib * _GIB,
        _start_bytes(config, checkpoint),
        memory_bytes(config) if config.device == "cpu" else 0,
        sum(map(_adapter_bytes, config.lora)),
    )


def _start_bytes(config: SizeConfig, checkpoint: dict[str, Any]) -> float:
    """Return the bytes of dequantized weights that engine torch holds at start; it has one GPU a rank."""
    is_torch = config.engine == "torch" and config.tp_size == config.dp_attention_size == 1
    if not is_torch or config.weights_gib is not None or not is_quantized(checkpoint):
        return 0.0
    return weights(checkpoint, dequantized=True).bytes_per_gpu()


def _adapter_bytes(directory: Path) -> int:
    """Return the bytes that an adapter takes in float32, in which it is computed. Raises ConfigError."""
    try:
        with safe_open(directory / lora.WEIGHTS, "numpy") as tensors:
            names = tensors.keys()
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        layers = lora.lora_layers(_read(directory / lora.CONFIG), shapes)
    except (OSError, SafetensorError, ConfigError) as error:
        raise ConfigError(f"adapter {directory}: {error}") from error
    return sum(4 * layer.parameters for layer in layers.values())


def _weights_bytes(config: SizeConfig, checkpoint: dict[str, Any]) -> float:
    draft = 0.0
    if config.draft_model is not None:
        draft = weights(read_config(config.draft_model)).bytes_per_gpu()
    if config.weights_gib is not None:
        return config.weights_gib * _GIB + draft
    return weights(checkpoint).bytes_per_gpu(config.tp_size, config.dp_attention_size) + draft


def _pool(config: SizeConfig, checkpoint: dict[str, Any]) -> Pool:
    dtype = config.dtype or kv_dtype(checkpoint)
    token_bytes = layer_groups(checkpoint).full.token_bytes(dtype, config.tp_size)
    return Pool(token_bytes + _draft_token_bytes(config, checkpoint), config.page_size, config.context_tokens)


def _draft_token_bytes(config: SizeConfig, checkpoint: dict[str, Any]) -> int:
    if config.draft_model is None:
        return 0
    draft = read_config(config.draft_model)
    return draft_groups(draft, checkpoint).whole_token_bytes(kv_dtype(draft))


def _carried(config: SizeConfig, checkpoint: dict[str, Any]) -> CarriedPools:
    return CarriedPools(
        layer_groups(checkpoint),
        config.dtype or kv_dtype(checkpoint),
        config.page_size,
        config.tp_size,
        -(-max(config.concurrency, 1) // config.ranks),
        config.checkpoints,
    )


def report(config: SizeConfig, checkpoint: dict[str, Any]) -> list[str]:
    pool, carried = _pool(config, checkpoint), _carried(config, checkpoint)
    full = carried.groups.full
    per_gpu = f" on each of {config.tp_size} GPUs" if config.tp_size > 1 else ""
    draft_bytes = _draft_token_bytes(config, checkpoint)
    lines = [
        f"KV per token       {format_bytes(pool.token_bytes - draft_bytes)}{per_gpu}: {len(full.layer_ids)} "
        f"layers, {full.heads}, {carried.dtype}",
        *([f"of its draft model {format_bytes(draft_bytes)} a token more"] if draft_bytes else []),
        f"a page             {config.page_size} tokens, {format_bytes(pool.page_bytes)}",
        f"a conversation     {config.context_tokens} tokens, {pool.conversation_pages} pages, "
        f"{format_bytes(pool.conversation_pages * pool.page_bytes)}",
        *_carried_lines(carried),
        _wanted(config, pool),
    ]
    if config.pool_gib is not None:
        lines.append(_held(config, pool, config.pool_gib * _GIB - carried.size_bytes))
    if config.kv_tier:
        lines += _tier_lines(config, checkpoint, pool, carried)
    return lines + _remarks(config, checkpoint)


def _carried_lines(carried: CarriedPools) -> Iterator[str]:
    dtype, page_size, tp_size = carried.dtype, carried.page_size, carried.tp_size
    for window in carried.groups.windows:
        tail = format_bytes(tail_bytes(window, dtype, page_size, tp_size))
        yield (
            f"a tail             up to {tail}: {len(window.layer_ids)} layers, {window.heads}, the last "
            f"{window.window} tokens"
        )
        pages = f"--window-pages={carried.window_pages(window)}"
        yield f"{'its pool'.ljust(18)} {pages} {_kept(carried, carried.window_bytes(window))}"
    if recurrent := carried.groups.recurrent:
        state = format_bytes(recurrent.state_bytes(dtype, tp_size))
        yield f"a state            {state}: {len(recurrent.layer_ids)} recurrent layers"
        yield f"{'its pool'.ljust(18)} --state-slots={carried.slots} {_kept(carried, carried.slot_bytes)}"


def _kept(carried: CarriedPools, size_bytes: int) -> str:
    held = f"{carried.running} running, {carried.checkpoints} checkpoints"
    return f"on each decode rank: {format_bytes(size_bytes)}{_per_gpu(carried.tp_size)} ({held})"


def _per_gpu(tp_size: int) -> str:
    return " per GPU" if tp_size > 1 else ""


def _wanted(config: SizeConfig, pool: Pool) -> str:
    pages = pool.pages_for(config.conversations, config.ranks)
    head = f"{config.conversations} conversations".ljust(18)
    size = f"{format_bytes(pages * pool.page_bytes)}{_per_gpu(config.tp_size)}"
    return f"{head} --kv-pages={pages} on each decode rank: {size}"


def _held(config: SizeConfig, pool: Pool, size_bytes: float) -> str:
    pages = pool.pages_in(max(0.0, size_bytes))
    held = pool.conversations_in(pages) * config.ranks
    head = f"{config.pool_gib:g} GiB{_per_gpu(config.tp_size) or ' a rank'}".ljust(18)
    text = f"{head} --kv-pages={pages}: {held} conversations on {config.ranks} ranks"
    if held < max(config.concurrency, 1):
        text += f"; too few for {config.concurrency or 1} at once: sequences would be retracted"
    return text


def _tiers(config: SizeConfig) -> tuple[TierPlace, ...]:
    """Return the tiers of a rank. Raises ConfigError where the rank would refuse them at its start."""
    places = tier_places(config.kv_tier)
    if places:
        if config.engine == "sglang":
            raise ConfigError("--kv-tier is not for --engine=sglang")
        if config.tp_size > 1:
            raise ConfigError("--kv-tier is for engine torch, whose ranks have one GPU each: not --tp-size")
    return places


def memory_bytes(config: SizeConfig) -> int:
    """Return the bytes of a rank's tiers in memory."""
    return sum(place.size_bytes for place in _tiers(config) if place.directory is None)


def _tier_lines(
    config: SizeConfig, checkpoint: dict[str, Any], pool: Pool, carried: CarriedPools
) -> Iterator[str]:
    """Yield what each tier holds and how fast it is, and the memory of a rank that has them.

    A tier has two checkpoints of a conversation, in whole slots. One of them is read. How fast memory is read
    for a pool on a GPU was never measured.
    """
    block_tokens = max(_INDEX_BLOCK, config.page_size)
    block_bytes = block_tokens * pool.token_bytes
    blocks, parts = max(1, config.context_tokens // block_tokens), -(-carried.point_bytes // block_bytes)
    for text, place in zip(config.kv_tier, _tiers(config), strict=True):
        shape = SlabShape.fitting(bytes(8), block_bytes, place.size_bytes)
        check_room(shape, parts)
        slots = shape.num_slots
        tokens = slots * blocks // (blocks + 2 * parts) * block_tokens
        held = slots // (blocks + 2 * parts) * config.ranks
        yield (
            f"{text.ljust(_LABEL - 1)} {tokens} tokens on each rank: {held} conversations on "
            f"{config.ranks} ranks"
        )
        in_memory_per_s = _MEMORY_GIB_PER_S if config.device == "cpu" else None
        gib_per_s = in_memory_per_s if place.directory is None else config.disk_gib_per_s
        if gib_per_s is not None:
            read_bytes = pool.token_bytes * (blocks + parts) / blocks
            yield f"{'read'.ljust(_LABEL - 1)} {_pace(gib_per_s * _GIB / read_bytes, config)}"
    pages = config.kv_pages or pool.pages_for(config.conversations, config.ranks)
    in_memory = memory_bytes(config)
    if config.device == "cuda":
        more = format_bytes(in_memory + block_bytes)
        yield f"host memory        {more} more than without tiers, on each rank"
        return
    own_bytes = weights(checkpoint, dequantized=True).bytes_per_gpu()
    if config.weights_gib is not None:
        own_bytes = config.weights_gib * _GIB
    beside = f"what is beside them {format_bytes(carried.size_bytes)}, " if carried.size_bytes else ""
    needed = own_bytes + pages * pool.page_bytes + carried.size_bytes + in_memory + _BESIDE_BYTES
    yield (
        f"memory of a rank   {format_bytes(needed)}: weights {format_bytes(own_bytes)}, --kv-pages={pages}, "
        f"{beside}tiers {format_bytes(in_memory)}, and {format_bytes(_BESIDE_BYTES)}"
    )


def _pace(tokens_per_s: float, config: SizeConfig) -> str:
    read, computed = f"{tokens_per_s:.0f} tokens a second", config.compute_tokens_per_s
    if computed is None:
        return read
    times = tokens_per_s / computed
    told = f"{times:.1f} times as fast as computing"
    return f"{read}, {told}" + (": a rank would leave it alone" if times <= 1 else "")


def _remarks(config: SizeConfig, checkpoint: dict[str, Any]) -> list[str]:
    remarks, groups = [], layer_groups(checkpoint)
    if groups.windows:
        dtype = config.dtype or kv_dtype(checkpoint)
        token = format_bytes(groups.whole_token_bytes(dtype, config.tp_size))
        remarks.append(f"SGLang keeps windows whole unless told otherwise: {token} a token, and no tails")
    if config.gpu_gib is not None and config.weights_gib is None and is_quantized(checkpoint):
        held = weights(checkpoint, dequantized=True).bytes_per_gpu(config.tp_size, config.dp_attention_size)
        remarks.append(
            f"weights count as they are stored, quantized; dequantized, as engine torch may hold them, they "
            f"take {format_bytes(held)}"
        )
    text = text_config(checkpoint)
    stated = text.get("max_position_embeddings")
    if stated and config.context_tokens > (longest := context_tokens(text)):
        remarks.append(f"the model's context ends at {longest} tokens")
    return remarks
