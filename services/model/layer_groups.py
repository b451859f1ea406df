"""This groups a checkpoint's layers by what they store for a sequence, from its config.json. It is pure.

Full attention has pages of page_size tokens, of every token. A window or chunk has pages of the last tokens,
in a pool of its own. Recurrent layers have one slot of a fixed size.

An engine decides by the model itself; this is for sizing and for reports before there is an engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.model.layer_kinds import LayerKinds, LayerState, layer_kinds, layer_state
from services.model.model_config import ITEM_BYTES, text_part
from services.values.errors import ConfigError
from services.values.kv import GroupKind, KvGroup

# Published checkpoints omit these, which are defaults of transformers' class.
_UNSAID = {
    "gemma3_text": {
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        **{"vocab_size": 262_208, "max_position_embeddings": 131_072},
    },
    "gemma4_text": {"global_head_dim": 512},
}


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers of one kind, one window and one width share a group, and a pool."""

    kind: GroupKind
    num_kv_heads: int  # This is 1 with a latent: every GPU of a rank stores the whole latent.
    head_dim: int  # This is the size of keys, or of the latent.
    v_head_dim: int  # With 0 this is a latent, which has no values.
    window: int  # This is in tokens, the token itself included; 0 means all.
    layer_ids: tuple[int, ...] = ()

    @property
    def heads(self) -> str:
        if self.v_head_dim == 0:
            return f"a latent of {self.head_dim}"
        values = "" if self.v_head_dim == self.head_dim else f" and {self.v_head_dim}"
        return f"{self.num_kv_heads} KV heads of {self.head_dim}{values}"

    def token_bytes(self, dtype: str, tp_size: int = 1) -> int:
        """Return a token's bytes on each of the `tp_size` GPUs of a rank.

        The GPUs divide the KV heads, and each has at least one.
        """
        heads = -(-self.num_kv_heads // tp_size)
        return len(self.layer_ids) * heads * (self.head_dim + self.v_head_dim) * ITEM_BYTES[dtype]

    def in_layout(self, dtype: str, page_size: int) -> KvGroup:
        width = None if self.v_head_dim == self.head_dim else self.v_head_dim
        size = self.token_bytes(dtype) * page_size
        return KvGroup(
            self.kind, self.layer_ids, self.num_kv_heads, self.head_dim, dtype, width, self.window, size
        )


@dataclass(frozen=True, slots=True)
class RecurrentGroup:
    layer: LayerState
    layer_ids: tuple[int, ...]

    def state_bytes(self, dtype: str, tp_size: int = 1) -> int:
        """Return the bytes of all layers' states on each GPU, as GPUs divide heads and channels."""
        return len(self.layer_ids) * self.layer.size_bytes(ITEM_BYTES[dtype]) // tp_size


@dataclass(frozen=True, slots=True)
class LayerGroups:
    # If no layer sees all, these are the windowed layers, whose KV is then stored whole, as pages.
    full: AttentionGroup
    windows: tuple[AttentionGroup, ...] = ()
    recurrent: RecurrentGroup | None = None
    masked_window: int = 0  # This is the window of layers in `full`.

    @property
    def carries(self) -> bool:
        return bool(self.windows or self.recurrent)

    def whole_token_bytes(self, dtype: str, tp_size: int = 1) -> int:
        """Return a token's bytes where windows are stored whole, as SGLang does by default."""
        return sum(group.token_bytes(dtype, tp_size) for group in (self.full, *self.windows))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text part of a config.json, with its class's defaults.

    Raises ConfigError.
    """
    text = text_part(config)
    return {**_UNSAID.get(str(text.get("model_type")), {}), **text}


def layer_groups(config: Mapping[str, Any]) -> LayerGroups:
    """Group the layers of a checkpoint's config.json.

    Raises ConfigError where it is incomplete, or has unknown layers.
    """
    try:
        return _groups(text_config(config))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"config.json does not tell what its layers keep: {reason}") from error


def draft_groups(draft: Mapping[str, Any], target: Mapping[str, Any]) -> LayerGroups:
    """Group the layers of a draft model, all of which store every token.

    Raises ConfigError where it cannot draft for the target, or is incomplete.
    """
    groups, own, wanted = layer_groups(draft), _vocab_size(draft), _vocab_size(target)
    if own != wanted:
        raise ConfigError(f"the draft model's vocabulary has {own} ids, the model's {wanted}")
    if groups.recurrent is not None:
        raise ConfigError("a model with recurrent layers cannot draft: their states are of one position")
    return groups


def _vocab_size(config: Mapping[str, Any]) -> Any:
    return text_config(config).get("vocab_size")


def _groups(config: Mapping[str, Any]) -> LayerGroups:
    kinds = layer_kinds(config)
    recurrent = tuple(layer for layer, own in enumerate(kinds) if GroupKind.RECURRENT in own)
    group = RecurrentGroup(layer_state(config), recurrent) if recurrent else None
    attention = _gathered(_attention_layers(kinds, config), lambda layer: _shape(config, kinds[layer], layer))
    full = [group for group in attention if group.kind is GroupKind.FULL_ATTENTION]
    windows = [group for group in attention if group.kind.is_windowed]
    if full:
        return LayerGroups(_only(full), tuple(windows), group)
    window = _only(windows)
    whole = replace(window, kind=GroupKind.FULL_ATTENTION, window=0)
    return LayerGroups(whole, (), group, masked_window=window.window)


def _attention_layers(kinds: Sequence[LayerKinds], config: Mapping[str, Any]) -> list[int]:
    """Return the layers with KV of their own: in some models the last ones read an earlier layer's."""
    own = len(kinds) - int(config.get("num_kv_shared_layers") or 0)
    return [layer for layer in range(own) if any(kind is not GroupKind.RECURRENT for kind in kinds[layer])]


def _only(groups: Sequence[AttentionGroup]) -> AttentionGroup:
    if len(groups) != 1:
        shapes = ", ".join(f"{group.num_kv_heads} x {group.head_dim}" for group in groups) or "none"
        raise ValueError(f"the layers that see most have to be alike, and are: {shapes}")
    return groups[0]


def _gathered(layers: Sequence[int], shape: Callable[[int], AttentionGroup]) -> list[AttentionGroup]:
    found: dict[AttentionGroup, list[int]] = {}
    for layer in layers:
        found.setdefault(shape(layer), []).append(layer)
    return [replace(group, layer_ids=tuple(ids)) for group, ids in found.items()]


def _shape(config: Mapping[str, Any], kinds: LayerKinds, layer: int) -> AttentionGroup:
    kind = next(kind for kind in kinds if kind is not GroupKind.RECURRENT)
    window = _window(config, kind)
    if latent := config.get("kv_lora_rank"):
        return AttentionGroup(kind, 1, int(latent) + int(config["qk_rope_head_dim"]), 0, window)
    own = _own_of_layer(config, kind, layer)
    heads = int(config["num_attention_heads"])
    kv_heads = int(own.get("num_key_value_heads") or config.get("num_key_value_heads") or heads)
    head_dim = int(
        own.get("head_dim")
        or config.get("head_dim")
        or config.get("attention_head_dim")
        or int(config["hidden_size"]) // heads
    )
    v_head_dim = int(own.get("v_head_dim") or config.get("v_head_dim") or head_dim)
    return AttentionGroup(kind, kv_heads, head_dim, v_head_dim, window)


def _window(config: Mapping[str, Any], kind: GroupKind) -> int:
    if kind is GroupKind.FULL_ATTENTION:
        return 0
    name = "sliding_window" if kind is GroupKind.SLIDING_WINDOW else "attention_chunk_size"
    if not config.get(name):
        raise ValueError(f"layers of {kind.value} and no {name}")
    return int(config[name])


def _own_of_layer(config: Mapping[str, Any], kind: GroupKind, layer: int) -> Mapping[str, Any]:
    if per_layer := config.get("per_layer_config"):
        own: Mapping[str, Any] = per_layer.get(str(layer)) or per_layer.get(layer) or {}
        return own
    if kind is GroupKind.FULL_ATTENTION:  # These are Gemma 4's.
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return {"head_dim": config.get("global_head_dim"), "num_key_value_heads": heads}
    names = ("head_dim", "v_head_dim", "num_key_value_heads")  # These are MiMo-V2's.
    return {name: config.get(f"swa_{name}") for name in names}
