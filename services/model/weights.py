"""How much memory a model's weights take, from its config.json alone. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.model.layer_groups import layer_groups
from services.model.sizing import ITEM_BYTES, kv_dtype
from services.values.errors import ConfigError

# What of a mixture of experts is called in Mixtral's, Qwen's and DeepSeek's config.json.
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class WeightsMemory:
    """Parameters by how they are shared out, and bytes of each."""

    attention: int  # with embeddings and head: with DP attention each rank has all of them
    feed_forward: int  # of all tensor-parallel processes together
    attention_item_bytes: float
    feed_forward_item_bytes: float

    def bytes_per_gpu(self, tp_size: int = 1, dp_size: int = 1) -> float:
        """`tp_size` GPUs share a rank's attention; with DP attention `dp_size` such ranks share the rest."""
        attention = self.attention * self.attention_item_bytes / tp_size
        return attention + self.feed_forward * self.feed_forward_item_bytes / (tp_size * dp_size)


def weights(config: Mapping[str, Any]) -> WeightsMemory:
    """Of a decoder of the kinds of Llama, Qwen, Mixtral and DeepSeek. Raises ConfigError.

    Layers that only speculation uses (num_nextn_predict_layers) are not loaded, and not counted.
    """
    text = config.get("text_config", config)
    item_bytes = float(ITEM_BYTES[kv_dtype(config)])
    linear_bytes = _quantized_bytes(config.get("quantization_config"), item_bytes)
    try:
        hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        tables = int(text["vocab_size"]) * hidden * (1 if text.get("tie_word_embeddings") else 2)
        attention = layers * _attention(text, hidden)
        feed_forward = sum(_feed_forward(text, hidden, layer) for layer in range(layers))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json does not tell the size of the weights: {error!r}") from error
    if layer_groups(config).recurrent:
        raise ConfigError("the weights of recurrent layers are not known here; say --weights-gib")
    norms = (2 * layers + 1) * hidden
    # Tables and norms keep their type where the rest is quantized.
    mean_bytes = (attention * linear_bytes + (tables + norms) * item_bytes) / (attention + tables + norms)
    return WeightsMemory(attention + tables + norms, feed_forward, mean_bytes, linear_bytes)


def _attention(text: Mapping[str, Any], hidden: int) -> int:
    heads = int(text["num_attention_heads"])
    if text.get("kv_lora_rank"):
        return _latent_attention(text, hidden, heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or hidden // heads)
    return 2 * hidden * head_dim * (heads + kv_heads)


def _latent_attention(text: Mapping[str, Any], hidden: int, heads: int) -> int:
    """MLA: queries, and keys and values, each through a latent."""
    latent, rope = int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"])
    nope, value = int(text["qk_nope_head_dim"]), int(text["v_head_dim"])
    query_dim = heads * (nope + rope)
    query_latent = text.get("q_lora_rank")
    queries = int(query_latent) * (hidden + query_dim) if query_latent else hidden * query_dim
    return queries + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _feed_forward(text: Mapping[str, Any], hidden: int, layer: int) -> int:
    """Gate, up and down of a layer's experts, and its router; or of the one that a dense layer has."""
    num_experts = next((int(text[name]) for name in _NUM_EXPERTS if text.get(name)), 0)
    if not num_experts or layer < int(text.get("first_k_dense_replace") or 0):
        return 3 * hidden * int(text["intermediate_size"])
    width = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    shared = int(text.get("n_shared_experts") or 0) * width + int(
        text.get("shared_expert_intermediate_size") or 0
    )
    return 3 * hidden * (num_experts * width + shared) + hidden * num_experts


def _quantized_bytes(quantization: Any, item_bytes: float) -> float:
    """Of a linear layer's parameter, without its share of the scales (of 128 x 128: 1 in 4,000)."""
    if not quantization:
        return item_bytes
    if quantization.get("quant_method") == "fp8":
        return 1.0
    raise ConfigError(
        f"weights quantized by {quantization.get('quant_method')!r} are not known here; say --weights-gib"
    )
