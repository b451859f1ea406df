"""A GGUF file of the llama family becomes a checkpoint: names, weights, tokenizer and configuration.

Three things are otherwise in such a file:
- rows of Q and K. The rotation pairs value i of a head with i + half in transformers; llama.cpp pairs 2i with
  2i + 1, and its converter moves the rows, so that they must be put back;
- how the tokenizer splits a text. The file has a name for it (tokenizer.ggml.pre), and llama.cpp a regular
  expression for each name (src/llama-vocab.cpp);
- names.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from services.model.gguf import Floats, Gguf, Tensor, floats_of
from services.values.errors import ConfigError

_ARCHITECTURE = "llama"
_OF_A_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_THE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_CONTROL, _USER_DEFINED = 3, 4  # these are of tokenizer.ggml.token_type
_KINDS: Mapping[type, str] = {str: "texts", int: "whole numbers"}
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight is one tensor of the checkpoint; the rows of `num_heads` heads (or none) are put back."""

    name: str
    tensor: Tensor
    num_heads: int

    def floats(self, data: Any) -> Floats:
        values = floats_of(data, self.tensor)
        return values if not self.num_heads else _rows_put_back(values, self.num_heads)


@dataclass(frozen=True, slots=True)
class LlamaGguf:
    weights: tuple[Weight, ...]
    tokenizer: str
    configs: Mapping[str, Mapping[str, Any]]


def llama_of(gguf: Gguf, sampling: Mapping[str, float] | None = None) -> LlamaGguf:
    """Make a checkpoint of the file.

    `sampling` is what its publisher would sample by, for generation_config.json; GGUF has no place for it.

    Raises:
        ConfigError: it is of another family, or has something that would be left out.
    """
    metadata = gguf.metadata
    _require_family(metadata)
    weights = tuple(_weights(gguf))
    ids = _special_ids(metadata)
    configs = {
        "config.json": _config(gguf, ids),
        "tokenizer_config.json": _tokenizer_config(metadata),
        "generation_config.json": {**ids, **({"do_sample": True, **sampling} if sampling else {})},
    }
    return LlamaGguf(weights, _tokenizer(metadata).to_str(), configs)


def _require_family(metadata: Mapping[str, Any]) -> None:
    family = metadata.get("general.architecture")
    if family != _ARCHITECTURE:
        raise ConfigError(f"the GGUF file is of the family {family!r}; only {_ARCHITECTURE} can be converted")
    if _count(metadata, "expert_count", 0):
        raise ConfigError("the GGUF file is of a model with experts, which cannot be converted")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(f"the GGUF file scales its rotation ({scaling}), which cannot be converted")
    if not _count(metadata, "attention.head_count") or not _count(metadata, "attention.head_count_kv", 1):
        raise ConfigError("the GGUF file is damaged: it states no heads of attention")
    head_dim = _head_dim(metadata)
    if _count(metadata, "rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("the GGUF file turns a part of each head only, which cannot be converted")


def _weights(gguf: Gguf) -> Iterator[Weight]:
    heads = _count(gguf.metadata, "attention.head_count")
    kv_heads = _count(gguf.metadata, "attention.head_count_kv", heads)
    turned = {"attn_q": heads, "attn_k": kv_heads}
    for tensor in gguf.tensors:
        parts = tensor.name.split(".")
        match parts:
            case [part, "weight"] if part in _OF_THE_MODEL:
                yield Weight(f"{_OF_THE_MODEL[part]}.weight", tensor, 0)
            case ["blk", layer, part, "weight"] if part in _OF_A_LAYER:
                num_heads = turned.get(part, 0)
                if num_heads and (len(tensor.shape) != 2 or tensor.shape[0] % (2 * num_heads)):
                    raise ConfigError(
                        f"the GGUF file is damaged: {tensor.name} has no rows of {num_heads} heads"
                    )
                yield Weight(f"model.layers.{layer}.{_OF_A_LAYER[part]}.weight", tensor, num_heads)
            case _:
                raise ConfigError(f"the GGUF file has a tensor {tensor.name}, which cannot be converted")
        if parts[0] in ("token_embd", "output") and tensor.shape[0] != len(_tokens(gguf.metadata)):
            raise ConfigError(f"the GGUF file is damaged: {tensor.name} has another length than its tokens")


def _rows_put_back(values: Floats, num_heads: int) -> Floats:
    heads = values.reshape(num_heads, -1, 2, values.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def _config(gguf: Gguf, ids: Mapping[str, int]) -> Mapping[str, Any]:
    metadata, heads = gguf.metadata, _count(gguf.metadata, "attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": _count(metadata, "embedding_length"),
        "intermediate_size": _count(metadata, "feed_forward_length"),
        "num_hidden_layers": _count(metadata, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _count(metadata, "attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata),
        "max_position_embeddings": _count(metadata, "context_length"),
        "rms_norm_eps": _short(_number(metadata, "attention.layer_norm_rms_epsilon")),
        "rope_theta": _number(metadata, "rope.freq_base", 10_000.0),
        "vocab_size": len(_tokens(metadata)),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in gguf.tensors),
        **ids,
    }


def _head_dim(metadata: Mapping[str, Any]) -> int:
    whole = _count(metadata, "embedding_length") // _count(metadata, "attention.head_count")
    return _count(metadata, "attention.key_length", whole)


def _short(number: float) -> float:
    """Return the number as it was before it was kept in float32."""
    return float(f"{number:.6g}")


def _tokenizer_config(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    tokens, template = _tokens(metadata), metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise ConfigError("the GGUF file is damaged: its tokenizer.chat_template is no text")
    names = {f"{name}_token": tokens[id_] for name, id_ in _known_ids(metadata, _SPECIAL).items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _count(metadata, "context_length"),
        **names,
        **({"chat_template": template} if template else {}),
    }


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    known = _known_ids(metadata, _SPECIAL)
    return {f"{name}_token_id": known[name] for name in ("bos", "eos", "pad") if name in known}


def _known_ids(metadata: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    num_tokens = len(_tokens(metadata))
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in names.items()}
    known = {name: metadata[key] for name, key in keys.items() if key in metadata}
    if wrong := [keys[name] for name, id_ in known.items() if not (_is_count(id_) and id_ < num_tokens)]:
        raise ConfigError(f"the GGUF file is damaged: {wrong[0]} is none of its {num_tokens} tokens")
    return known


def _tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"the GGUF file's tokenizer is of the kind {kind!r}; only gpt2 (byte-level BPE) can be converted"
        )
    tokens, merges = _tokens(metadata), _list(metadata, "tokenizer.ggml.merges", str)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    ids = {token: id_ for id_, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise ConfigError("the GGUF file is damaged: a token stands twice in its tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(ids, pairs))
    tokenizer.pre_tokenizer = _splitting(metadata.get("tokenizer.ggml.pre"))
    tokenizer.decoder = decoders.ByteLevel()
    types = _list(metadata, "tokenizer.ggml.token_type", int)
    for is_special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        found = [token for token, kind in zip(tokens, types, strict=False) if kind == wanted]
        added = [AddedToken(token, normalized=False, special=is_special) for token in found]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
    if metadata.get("tokenizer.ggml.add_bos_token"):
        known = _known_ids(metadata, {"bos": "bos"})
        if "bos" not in known:
            raise ConfigError("the GGUF file is damaged: it adds a bos token and names none")
        first = tokens[known["bos"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, tokens.index(first))]
        )
    return tokenizer


def _bpe(vocabulary: dict[str, int], merges: list[Any]) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges)
    except Exception as error:  # tokenizers raises no class of its own
        raise ConfigError(f"the GGUF file's merges do not fit its tokens: {error}") from error


def _splitting(name: str | None) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise ConfigError(
        f"the GGUF file's tokenizer splits texts as {name!r}; only gpt-2 and smollm can be converted"
    )


def _tokens(metadata: Mapping[str, Any]) -> Sequence[str]:
    tokens: Sequence[str] = _list(metadata, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise ConfigError("the GGUF file has no tokens (tokenizer.ggml.tokens)")
    return tokens


def _list(metadata: Mapping[str, Any], key: str, kind: type) -> Sequence[Any]:
    values = metadata.get(key, [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ConfigError(f"the GGUF file is damaged: its {key} is no list of {_KINDS[kind]}")
    return values


def _number(metadata: Mapping[str, Any], name: str, default: float | None = None) -> Any:
    value = metadata.get(f"llama.{name}", default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(f"the GGUF file's llama.{name} is {value!r}, not a number")
    return value


def _count(metadata: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = metadata.get(f"llama.{name}", default)
    if not _is_count(value):
        raise ConfigError(f"the GGUF file's llama.{name} is {value!r}, not a whole number")
    return int(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
