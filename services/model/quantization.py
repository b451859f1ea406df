"""This module reads from config.json how weights are quantized, and whether that is served. It is pure.

Engines recognize a tensor by the names of its parts; only what these do not show is read here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.values.errors import ConfigError

# These formats of compressed-tensors, as its config names them, are supported.
_COMPRESSED = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
MODELOPT_FILE = "hf_quant_config.json"  # It lies beside config.json, which older ModelOpt did not change.
_BITS = (2, 4, 8)
_MODELOPT = ("FP8", "NVFP4")
_GEMM = ("gemm", "awq")
_SCALE_BITS = 16


@dataclass(frozen=True, slots=True)
class Quantization:
    method: str
    linear_bits: float  # A parameter of a linear layer takes so many bits as stored, with its group's scale.
    block: tuple[int, int] | None = None  # So many rows and columns share a scale, where that is stated.
    zeros_less_one: bool = False  # GPTQ stores each zero point less one.
    experts_only: bool = False
    symmetric: bool = True  # Where this is False, integers have zero points.


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the weights are quantized, or None where config.json does not state it.

    Raises ConfigError, which names the method, for one that is not served.
    """
    stated = _stated(config)
    if stated is None:
        return None
    loads = stated.get("load_in_8bit") or stated.get("load_in_4bit")
    method = stated.get("quant_method", "bitsandbytes" if loads else None)
    if not isinstance(method, str) or method not in _READ:
        known = ", ".join(_READ)
        raise ConfigError(f"weights quantized by {method!r} are not served; read are {known}")
    try:
        return _READ[method](stated)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"the quantization_config of {method!r} is not understood: {error!r}") from error


def with_modelopt(config: Mapping[str, Any], stated: object) -> dict[str, Any]:
    """Return the config with the content of ModelOpt's own file, where config.json states nothing."""
    if not isinstance(stated, Mapping) or not stated or is_quantized(config):
        return dict(config)
    return {**config, "quantization_config": {**stated, "quant_method": "modelopt"}}


def is_quantized(config: Mapping[str, Any]) -> bool:
    return _stated(config) is not None


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for part in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part, Mapping) and (stated := part.get(key)):
                if not isinstance(stated, Mapping):
                    raise ConfigError(f"config.json's {key} is no object: {stated!r}")
                return stated
    return None


def _fp8(stated: Mapping[str, Any]) -> Quantization:
    block = stated.get("weight_block_size")
    if block is None:
        return Quantization("fp8", 8)
    rows, columns = (int(each) for each in block)
    return Quantization("fp8", 8, (rows, columns))


def _awq(stated: Mapping[str, Any]) -> Quantization:
    named = [stated.get(key) for key in ("version", "format", "checkpoint_format")]
    version = next((str(each).lower() for each in named if each and str(each).lower() not in _GEMM), "gemm")
    if version != "gemm":
        raise ConfigError(f"AWQ weights of version {version!r} are not served; read is gemm")
    return Quantization("awq", _grouped_bits(_known_bits(stated), stated.get("group_size")))


def _gptq(stated: Mapping[str, Any]) -> Quantization:
    version = stated.get("checkpoint_format") or stated.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2") or stated.get("is_marlin_format"):
        raise ConfigError(f"GPTQ weights of format {version!r} are not served; read are gptq and gptq_v2")
    bits = _grouped_bits(_known_bits(stated), stated.get("group_size"))
    return Quantization("gptq", bits, zeros_less_one=version == "gptq")


def _known_bits(stated: Mapping[str, Any]) -> int:
    bits = stated.get("bits", stated.get("w_bit", 4))
    if str(bits) not in map(str, _BITS):
        raise ConfigError(f"weights of {bits!r} bits are not served; read are those of {_BITS}")
    return int(bits)


def _grouped_bits(bits: int, group_size: Any) -> float:
    """Return a parameter's bits, where `group_size` or a whole row share a scale and a zero point."""
    size = int(group_size or -1)
    return bits + (_SCALE_BITS + bits) / size if size > 0 else float(bits)


def _compressed(stated: Mapping[str, Any]) -> Quantization:
    groups = [dict(group) for group in (stated.get("config_groups") or {}).values()]
    for name in {stated.get("format"), *(group.get("format") for group in groups)} - {None}:
        if name not in _COMPRESSED:
            known = ", ".join(_COMPRESSED)
            raise ConfigError(f"compressed-tensors of format {name!r} are not served; read are {known}")
    sparsity = (stated.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ConfigError(f"compressed-tensors of sparsity {sparsity!r} are not served")
    if (stated.get("transform_config") or {}).get("config_groups"):
        raise ConfigError("compressed-tensors with a transform_config are not served")
    weights = [group["weights"] for group in groups if group.get("weights")]
    blocks = {tuple(map(int, each["block_structure"])) for each in weights if each.get("block_structure")}
    block = blocks.pop() if len(blocks) == 1 else None
    if block is not None and len(block) != 2:
        raise ConfigError(f"compressed-tensors of blocks {block} are not served")
    bits = max((_compressed_bits(each) for each in weights), default=16.0)
    is_symmetric = not weights or any(each.get("symmetric") is not False for each in weights)
    own_block = block and (block[0], block[1])
    return Quantization("compressed-tensors", bits, own_block, symmetric=is_symmetric)


def _compressed_bits(weights: Mapping[str, Any]) -> float:
    bits, kind, size = (
        int(weights["num_bits"]),
        weights.get("type", "int"),
        int(weights.get("group_size") or -1),
    )
    if bits not in ((4, 8) if kind == "float" else _BITS):
        raise ConfigError(f"compressed-tensors of {bits} bits ({kind}) are not served")
    scale_bits = 8 if kind == "float" and bits == 4 else _SCALE_BITS
    zero_bits = 0 if weights.get("symmetric", True) else bits
    return bits + (scale_bits + zero_bits) / size if size > 0 else float(bits)


def _mxfp4(_stated: Mapping[str, Any]) -> Quantization:
    return Quantization("mxfp4", 4 + 8 / 32, experts_only=True)


def _modelopt(stated: Mapping[str, Any]) -> Quantization:
    algorithm = stated.get("quant_algo") or (stated.get("quantization") or {}).get("quant_algo")
    if algorithm not in _MODELOPT:
        known = " and ".join(_MODELOPT)
        raise ConfigError(f"ModelOpt weights of {algorithm!r} are not served; read are {known}")
    return Quantization("modelopt", 8 if algorithm == "FP8" else 4 + 8 / 16)


_READ: Mapping[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda stated: Quantization("fbgemm_fp8", 8),
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}
