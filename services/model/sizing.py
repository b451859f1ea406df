"""How much KV a model's conversations need. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.values.errors import ConfigError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_NO_KV = ("linear_attention", "mamba", "recurrent")  # of layer_types: a state of fixed size instead


@dataclass(frozen=True, slots=True)
class KvShape:
    """What of a model's architecture decides the size of its KV."""

    num_layers: int  # that keep KV
    layer_width: int  # values per token and layer: keys and values of all heads, or MLA's latent
    num_kv_heads: int  # 1 with MLA: every GPU of a rank keeps the whole latent
    description: str
    windowed_layers: int = 0  # counted like the others, though they need less

    def token_bytes(self, dtype: str, tp_size: int = 1) -> int:
        """On each of the `tp_size` GPUs of a rank, which share the KV heads; no less than one head each."""
        width = self.layer_width // self.num_kv_heads * -(-self.num_kv_heads // tp_size)
        return self.num_layers * width * ITEM_BYTES[dtype]


def kv_shape(config: Mapping[str, Any]) -> KvShape:
    """Of a checkpoint's config.json. Raises ConfigError when it says too little."""
    config = config.get("text_config", config)
    try:
        layer_types = config.get("layer_types") or ["full_attention"] * int(config["num_hidden_layers"])
        with_kv = [kind for kind in layer_types if kind not in _NO_KV]
        windowed = sum("sliding" in kind for kind in with_kv)
        if latent := config.get("kv_lora_rank"):
            width = int(latent) + int(config["qk_rope_head_dim"])
            return KvShape(len(with_kv), width, 1, f"a latent of {width}", windowed)
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json does not tell the size of the KV: {error!r}") from error
    return KvShape(
        len(with_kv), 2 * kv_heads * head_dim, kv_heads, f"{kv_heads} KV heads of {head_dim}", windowed
    )


def kv_dtype(config: Mapping[str, Any]) -> str:
    """The type of the weights, which KV has too unless told otherwise. Raises ConfigError."""
    text = config.get("text_config", {})
    name = next((c[key] for c in (config, text) for key in ("dtype", "torch_dtype") if c.get(key)), None)
    if name not in ITEM_BYTES:
        raise ConfigError(f"config.json names dtype {name!r}; say --dtype={'|'.join(ITEM_BYTES)}")
    return str(name)


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV of one rank: a conversation of `context_tokens` takes whole pages of `page_size` tokens."""

    token_bytes: int
    page_size: int
    context_tokens: int

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    @property
    def conversation_pages(self) -> int:
        return -(-self.context_tokens // self.page_size)

    def pages_in(self, size_bytes: float) -> int:
        return int(size_bytes // self.page_bytes)

    def pages_for(self, conversations: int, ranks: int) -> int:
        """On each rank when the conversations are spread as evenly as they can be."""
        return -(-conversations // ranks) * self.conversation_pages

    def conversations_in(self, pages: int) -> int:
        return pages // self.conversation_pages
