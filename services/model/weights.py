"""This module computes the memory of a model's weights from its config.json alone. It is pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.model.layer_groups import text_config
from services.model.layer_kinds import LayerKinds, layer_kinds, recurrent_parameters
from services.model.model_config import ITEM_BYTES, kv_dtype
from services.model.quantization import quantization_of
from services.values.errors import ConfigError
from services.values.kv import GroupKind

_GATED = ("qwen3_5", "qwen3_next")  # The queries of these models include a gate.
# These are the names of the number of experts in the config.json of Mixtral, Qwen and DeepSeek.
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class WeightsMemory:
    attention: int  # This includes embeddings and head: with DP attention each rank has all of them.
    feed_forward: int  # This is for all tensor-parallel processes together.
    attention_item_bytes: float
    feed_forward_item_bytes: float

    def bytes_per_gpu(self, tp_size: int = 1, dp_size: int = 1) -> float:
        """Return the bytes that each GPU holds.

        `tp_size` GPUs share a rank's attention; with DP attention `dp_size` such ranks share the rest.
        """
        attention = self.attention * self.attention_item_bytes / tp_size
        return attention + self.feed_forward * self.feed_forward_item_bytes / (tp_size * dp_size)


def weights(config: Mapping[str, Any], *, dequantized: bool = False) -> WeightsMemory:
    """Count the weights of a decoder whose layers layer_kinds.py knows. Raises ConfigError.

    Quantized ones have their size in the checkpoint or, if `dequantized`, that of its dtype. Layers that only
    speculation uses (num_nextn_predict_layers) are not loaded, and not counted.
    """
    text = text_config(config)
    item_bytes = float(ITEM_BYTES[kv_dtype(config)])
    quantization = quantization_of(config)
    linear_bytes = quantization.linear_bits / 8 if quantization and not dequantized else item_bytes
    attention_bytes = item_bytes if quantization and quantization.experts_only else linear_bytes
    try:
        hidden, kinds = int(text["hidden_size"]), layer_kinds(text)
        layers = len(kinds)
        tables = int(text["vocab_size"]) * hidden * (1 if text.get("tie_word_embeddings") else 2)
        attention = sum(_mixers(text, hidden, own) for own in kinds)
        feed_forward = sum(_feed_forward(text, hidden, layer) for layer in _with_feed_forward(text, kinds))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"config.json does not tell the size of the weights: {error!r}") from error
    if not hidden:
        raise ConfigError("config.json does not tell the size of the weights: its hidden_size is 0")
    if text.get("hidden_size_per_layer_input"):
        raise ConfigError("embeddings of each layer are not counted here; say --weights-gib")
    norms = (2 * layers + 1) * hidden
    # Tables and norms keep their type where the rest is quantized.
    unquantized = (tables + norms) * item_bytes
    mean_bytes = (attention * attention_bytes + unquantized) / (attention + tables + norms)
    return WeightsMemory(attention + tables + norms, feed_forward, mean_bytes, linear_bytes)


def _mixers(text: Mapping[str, Any], hidden: int, kinds: LayerKinds) -> int:
    recurrent = GroupKind.RECURRENT in kinds
    attends = len(kinds) > recurrent
    own = _attention(text, hidden) if attends else 0
    return own + (recurrent_parameters(text) if recurrent else 0)


def _attention(text: Mapping[str, Any], hidden: int) -> int:
    heads = int(text["num_attention_heads"])
    if text.get("kv_lora_rank"):
        return _latent_attention(text, hidden, heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or hidden // heads)
    gates = heads if str(text.get("model_type")).startswith(_GATED) else 0
    return hidden * head_dim * (2 * (heads + kv_heads) + gates)


def _latent_attention(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    latent, rope = int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"])
    nope, value = int(text["qk_nope_head_dim"]), int(text["v_head_dim"])
    query_dim = heads * (nope + rope)
    query_latent = text.get("q_lora_rank")
    queries = int(query_latent) * (hidden + query_dim) if query_latent else hidden * query_dim
    return queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _with_feed_forward(text: Mapping[str, Any], kinds: Sequence[LayerKinds]) -> list[int]:
    """Return the layers that have a feed-forward.

    Where layers alternate between mixers and feed-forwards (Nemotron-H), these are the ones without a mixer.
    """
    apart = [layer for layer, own in enumerate(kinds) if not own]
    return apart or list(range(len(kinds)))


def _feed_forward(text: Mapping[str, Any], hidden: int, layer: int) -> int:
    # There are a matrix up, one down, and mostly one for a gate.
    matrices = 2 if text.get("mlp_hidden_act") == "relu2" else 3
    num_experts = _num_experts(text, layer)
    if not num_experts:
        return matrices * hidden * int(text.get("intermediate_size_mlp") or text["intermediate_size"])
    width = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    shared = _shared_width(text, width)
    return matrices * hidden * (num_experts * width + shared) + hidden * num_experts


def _num_experts(text: Mapping[str, Any], layer: int) -> int:
    num_experts = next((int(text[name]) for name in _NUM_EXPERTS if text.get(name)), 0)
    words = (
        text.get("layers_block_type") or text.get("hybrid_override_pattern") or text.get("mlp_layer_types")
    )
    if words:
        return 0 if words[layer] in ("mlp", "-", "dense") else num_experts
    if layer < int(text.get("first_k_dense_replace") or 0) or layer in (text.get("mlp_only_layers") or ()):
        return 0
    step = int(text.get("interleave_moe_layer_step") or text.get("decoder_sparse_step") or 1)
    return 0 if (layer + 1) % step else num_experts


def _shared_width(text: Mapping[str, Any], width: int) -> int:
    if own := text.get("moe_shared_expert_intermediate_size") or text.get("shared_expert_intermediate_size"):
        return int(own) * int(text.get("n_shared_experts") or 1)
    if str(text.get("model_type")).startswith("llama4"):
        return width
    return int(text.get("n_shared_experts") or 0) * width
