"""This reads from a checkpoint's config.json whether SGLang can serve the model, and what matters for KV.

With full attention, MLA's latent and its sparse attention, every layer stores the KV of every token: pages.
Windows of the same width as the other layers are stored whole, or transferred as tails (has_window_memory).
Recurrent layers are transferred as states. Other models are refused, since what they store is not known here.
"""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.engine.start_fault import start_fault
from services.host.child_processes import dying_with_us
from services.model.layer_groups import LayerGroups, layer_groups, text_config
from services.model.model_config import context_tokens, disagreement
from services.values.errors import ConfigError, Unavailable

# These are lists of the layers' kinds, and the words for full attention; 1 is MiniMax's.
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "mixer_types", "attn_type_list")
_FULL_ATTENTION = ("full_attention", "attention", "attn", "indexed_attention", "deepseek_sparse_attention", 1)
# A layer sees so many tokens; SGLang reads the first three (configs/model_config.py).
_WINDOWS = (
    "sliding_window_size",
    "sliding_window",
    "window_size",
    "attention_window_size",
    "attention_chunk_size",
)
# Models with layers of other kinds, which they may list nowhere, have these.
_OTHER_LAYERS = (
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_key_heads",
    "mamba_d_state",
    "ssm_state_size",
    "ssm_cfg",
    "state_size",
    "conv_L_cache",
    "compress_ratios",
)
# What such layers store fits no group, whatever else config.json has.
_UNKNOWN = ("hybrid_layer_pattern", "ssm_cfg", "state_size", "compress_ratios")
_REFUSED = "no model for --engine=sglang"
_WINDOW_MODULE = "services.engine.sglang.inside.window_memory"
# A node of stock SGLang 0.5.23's tree is a hit only if every component has what it needs there.
WINDOW_MEMORY_WARNING = (
    "windows' KV is in memory of its own, as asked for: prompts that begin alike and then differ find "
    "nothing on decode, and a conversation whose window was evicted finds less than attention holds"
)
RECURRENT_WARNING = (
    "SGLang's decode finds a prefix only where it kept a state: at the end of an answer, at multiples of "
    "--mamba-track-interval; prompts that begin alike and then differ find nothing, whatever attention holds"
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    vocab_size: int
    max_position_embeddings: int  # Rotary angles may be stretched from it to the context.
    is_windowed: bool = False  # Some layers see less than the context.
    is_recurrent: bool = False

    @classmethod
    def read(cls, model_path: str) -> "ModelShape":
        """Read config.json.

        Raises ConfigError where it is missing, incomplete, or has layers whose storage is not known. Raises
        Unavailable where it cannot be read now.
        """
        try:
            whole = json.loads((Path(model_path) / "config.json").read_text())
            contradiction, config = disagreement(whole), text_config(whole)
            heads = config["num_attention_heads"]
            head_dim = config.get("head_dim") or config["hidden_size"] // heads
            kv_heads = config.get("num_key_value_heads") or heads
            stated, vocab_size = config["max_position_embeddings"], config["vocab_size"]
            context = context_tokens(config)
            shape = cls(int(kv_heads), int(head_dim), context, int(vocab_size), int(stated))
            reasons = list(not_full_attention(config))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise start_fault(f"config.json of {model_path} cannot be used: {error!r}", error) from error
        if contradiction:
            raise ConfigError(f"{model_path}/config.json contradicts itself: {contradiction}")
        return replace(shape, **_beside_full_attention(whole, reasons)) if reasons else shape


def _beside_full_attention(whole: Mapping[str, Any], reasons: list[str]) -> dict[str, bool]:
    """Return which layers there are beside full attention.

    `reasons` are what config.json has about other layers. Raises ConfigError where that does not suffice.
    """
    stated = f"its config.json says {'; '.join(reasons)}"
    if unknown := [name for name in _UNKNOWN if text_config(whole).get(name)]:
        raise ConfigError(f"{_REFUSED}: {stated}, and what {', '.join(unknown)} comes to is not known here")
    try:
        groups = layer_groups(whole)
    except ConfigError as error:
        raise ConfigError(f"{_REFUSED}: {stated}; {error}") from error
    is_windowed = bool(groups.windows or groups.masked_window)
    if not is_windowed and groups.recurrent is None:
        raise ConfigError(f"{_REFUSED}: {stated}, and not which layers those are")
    _require_one_width(groups, stated)
    return {"is_windowed": is_windowed, "is_recurrent": groups.recurrent is not None}


def _require_one_width(groups: LayerGroups, stated: str) -> None:
    """Raise ConfigError unless all layers have one width.

    Windows that are stored whole lie in one pool with the rest. With windows in memory of their own, SGLang
    refuses such a model with the decode cache (mem_cache/kv_cache_builder.py).
    """
    full = (groups.full.num_kv_heads, groups.full.head_dim, groups.full.v_head_dim)
    for window in groups.windows:
        if (window.num_kv_heads, window.head_dim, window.v_head_dim) != full:
            raise ConfigError(f"{_REFUSED}: {stated}, with {window.heads} beside {groups.full.heads}")


def not_full_attention(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what config.json, or its text part, has about layers without full attention."""
    listed = [name for name in _LAYER_LISTS if config.get(name)]
    for name in listed:
        if others := sorted({str(kind) for kind in config[name] if kind not in _FULL_ATTENTION}):
            yield f"{name}: {', '.join(others)}"
    if not listed:  # Where layers are listed, only the list counts.
        yield from (f"{name}={config[name]}" for name in _WINDOWS if _sees_less(config, name))
        yield from (name for name in _OTHER_LAYERS if config.get(name))


def _sees_less(config: Mapping[str, Any], name: str) -> bool:
    """Return whether a layer sees less than its whole context.

    Qwen's files may have windows that are switched off, or begin after the last layer.
    """
    window = config.get(name)
    if not isinstance(window, int) or window <= 0 or not config.get("use_sliding_window", True):
        return False
    first = config.get("max_window_layers") if config.get("use_sliding_window") else None
    if isinstance(first, int) and first >= int(config.get("num_hidden_layers", first + 1)):
        return False
    return window < int(config["max_position_embeddings"])


async def has_window_memory(model_path: str, environment: Mapping[str, str]) -> bool:
    """Return whether SGLang would give windows' KV memory of its own, by its list of architectures.

    This loads SGLang's libraries in a child process, which takes seconds. Raises ConfigError where that gives
    no answer, and Unavailable where it was killed, as memory may be short.
    """
    process = await asyncio.create_subprocess_exec(
        *dying_with_us([sys.executable, "-m", _WINDOW_MODULE, model_path]),
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if (process.returncode or 0) < 0:
        raise Unavailable(f"what asks SGLang about this model's windows ended with {process.returncode}")
    answers = {"true": True, "false": False}
    answer = (output.decode(errors="replace").split() or [""])[-1]
    if process.returncode or answer not in answers:
        last = (errors.decode(errors="replace").strip().splitlines() or ["it wrote nothing"])[-1]
        raise ConfigError(f"SGLang does not say what it does with this model's windows: {last}")
    return answers[answer]
