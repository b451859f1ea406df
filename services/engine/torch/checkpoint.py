"""This module opens a checkpoint directory on a local disk, computes its fingerprint and loads the model."""

import json
import logging
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar, set_tqdm_hook

from services.engine.start_fault import reading, start_fault
from services.engine.torch.attention.paged_attention import IMPLEMENTATION
from services.engine.torch.quantized.stored_tensors import (
    PARTS,
    gguf_weights,
    named_weights,
    open_tensors,
    sampled_gguf,
)
from services.model.model_config import context_tokens, disagreement
from services.model.quantization import MODELOPT_FILE, Quantization, quantization_of, with_modelopt
from services.settings.named_models import INDEX, WEIGHTS, gguf_weights_of
from services.values.errors import ConfigError

log = logging.getLogger(__name__)

# The weights of a quantized checkpoint are computed with as numbers of the served dtype.
DEQUANTIZED = "dequantized"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_HEADER_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Their angles depend on the longest position of the call, so they would depend on other requests of the
# batch.
_UNSUPPORTED_ROPE = ("dynamic", "longrope")
# These keys do not affect what the model computes, or the weights' headers state the same.
_IRRELEVANT_KEYS = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
_SAMPLE_BYTES = 4096
_REPORT_EVERY_S = 2.0

# While transformers loads a model, torch's default dtype is the model's and no weights are tied, in the whole
# process. Two loads at once would restore each other's state: half precision, or untied weights, for good.
LOADING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    directory: Path
    config: PreTrainedConfig
    dtype: torch.dtype
    # See model_fingerprint; with quantized weights it also covers how they are computed with.
    fingerprint: int
    quantization: Quantization | None = None
    is_quantized: bool = False

    @property
    def max_context_tokens(self) -> int:
        try:
            return context_tokens(self.config.get_text_config().to_dict())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{self.directory}/config.json tells no length of context: {error!r}"
            ) from error

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    def tokenizer(self) -> dict[str, Any]:
        """Return the content of tokenizer.json, or {} without the file.

        Raises ConfigError where the file is damaged.
        """
        path = self.directory / "tokenizer.json"
        return _read_json(path) if path.exists() else {}


def open_checkpoint(directory: Path, dtype: str | None = None) -> Checkpoint:
    """Read the configuration and the weights' headers, but no weights.

    `dtype` is float32, bfloat16 or float16; None means the checkpoint's.

    Raises ConfigError where something is missing, damaged or not supported, and the message names it. Raises
    Unavailable where the checkpoint cannot be read now.
    """
    with reading(f"the checkpoint {directory}"):
        return _open(directory, dtype)


def _open(directory: Path, dtype: str | None) -> Checkpoint:
    raw = _read_config(directory)
    _require_supported(directory, raw)
    # This comes first, since transformers refuses some of these checkpoints with other messages.
    quantization = _quantization(directory, raw)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # The exceptions of transformers' config checks share no other class.
        raise start_fault(f"{directory}/config.json cannot be read as a model: {error}", error) from error
    _require_causal(directory, config)
    is_quantized = quantization is not None or _is_stored_otherwise(directory)
    name = dtype or _own_dtype(directory, raw, is_quantized)
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} of {directory} is not supported; use one of {', '.join(DTYPES)}")
    fingerprint = model_fingerprint(directory)
    if is_quantized:
        config = _without_quantization(config)
        _named_weights(directory, quantization, DTYPES[name])
        fingerprint = computed_by(fingerprint, DEQUANTIZED)
    return Checkpoint(directory, config, DTYPES[name], fingerprint, quantization, is_quantized)


def computed_by(fingerprint: int, way: str) -> int:
    """Return the fingerprint of a quantized model whose weights are computed with in the given way.

    Each way rounds KV differently, so ranks with different ways must not share it.
    """
    return xxhash.xxh3_64_intdigest(f"{fingerprint:016x} {way}".encode())


def _quantization(directory: Path, raw: dict[str, Any]) -> Quantization | None:
    beside = directory / MODELOPT_FILE
    try:
        return quantization_of(with_modelopt(raw, _read_json(beside)) if beside.is_file() else raw)
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error


def _is_stored_otherwise(directory: Path) -> bool:
    """Return whether weights are quantized, even if config.json does not state it (8-bit floats and GGUF)."""
    if gguf_weights_of(directory) is not None:
        return True
    for path in _weight_files(directory):
        with path.open("rb") as file:
            if any(str(tensor["dtype"]).startswith("F8_") for tensor in _tensors(_read_header(file))):
                return True
    return False


def _without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    config = deepcopy(config)
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if hasattr(part, key):
                delattr(part, key)
    return config


def load_model(checkpoint: Checkpoint, device: torch.device) -> PreTrainedModel:
    """Load the model with our attention, in evaluation mode, on `device`.

    Raises ConfigError where a weight is missing or has the wrong shape. Raises Unavailable where memory is
    short, the device is lost, or a file cannot be read now.
    """
    disable_progress_bar()  # A rank's standard error is a log.
    try:
        with LOADING, reporting_progress():
            make = _of_named_weights if checkpoint.is_quantized else _of_files
            model, report = make(
                checkpoint,
                dtype=checkpoint.dtype,
                attn_implementation=IMPLEMENTATION,
                output_loading_info=True,
            )
        # transformers fills missing weights with random numbers; such a model must not serve.
        missing = [*report["missing_keys"], *report["mismatched_keys"]]
        if missing:
            raise ConfigError(f"weights of {checkpoint.directory} are missing or misshapen: {missing[:4]}")
        if left := _left_out(checkpoint, report["unexpected_keys"]):
            raise ConfigError(
                f"weights of {checkpoint.directory} have no place in {type(model).__name__}: {left[:4]}"
            )
        loaded: PreTrainedModel = model.to(device).eval()
    except ConfigError:
        raise
    except Exception as error:  # Reading files, safetensors and allocating may raise any class, too.
        raise start_fault(f"weights of {checkpoint.directory} cannot be loaded: {error}", error) from error
    return loaded


def _of_files(checkpoint: Checkpoint, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    made: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
        checkpoint.directory, config=checkpoint.config, use_safetensors=True, local_files_only=True, **options
    )
    return made


def _of_named_weights(checkpoint: Checkpoint, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Create the model from named tensors; transformers' automatic classes only read files."""
    config = checkpoint.config
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes = found if isinstance(found, list | tuple) else (found,)
    named = (each for each in classes if each.__name__ in (config.architectures or ()))
    model_class = next(named, classes[0])
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    made: tuple[PreTrainedModel, dict[str, Any]] = model_class.from_pretrained(
        None, config=config, state_dict=stored_weights(checkpoint), **options
    )
    return made


def _left_out(checkpoint: Checkpoint, unexpected: Collection[str]) -> list[str]:
    """Return the names of quantized weights that the model has no place for although it needs them.

    A GGUF file contains only weights that its model uses. In other formats some parts may stay unused, such
    as layers for speculation alone, and biases of zeros, which GPTQ writes where a model has none.
    """
    if not checkpoint.is_quantized:
        return []
    if gguf_weights_of(checkpoint.directory) is not None:
        return sorted(unexpected)
    weights = stored_weights(checkpoint)
    return [
        name
        for name in sorted(unexpected)
        if name.endswith(PARTS)
        or (name.endswith(".bias") and not (name in weights and not weights[name][...].any()))
    ]


def stored_weights(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the weights of a quantized checkpoint by name; each is read when it is accessed."""
    return _named_weights(checkpoint.directory, checkpoint.quantization, checkpoint.dtype)


def _named_weights(directory: Path, quantization: Quantization | None, dtype: torch.dtype) -> dict[str, Any]:
    try:
        if (file := gguf_weights_of(directory)) is not None:
            return dict(gguf_weights(file))
        return dict(named_weights(open_tensors(_weight_files(directory)), quantization, dtype))
    except SafetensorError as error:
        raise ConfigError(f"{directory} holds damaged weights: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{directory}: {error}") from error


def model_fingerprint(directory: Path) -> int:
    """Return the 64-bit XXH3 of the model's identity, which is equal for equal copies of a checkpoint.

    It covers config.json without the keys that do not affect the computation, and of every weight file its
    name, size, header, and the first and middle 4 KiB of each tensor. It is cheap for any size. It does not
    distinguish tensors that differ only elsewhere.

    Raises ConfigError where a file is missing or damaged, and Unavailable where one cannot be read now.
    """
    with reading(f"the checkpoint {directory}"):
        return _fingerprint(directory)


def _fingerprint(directory: Path) -> int:
    config = {key: value for key, value in _read_config(directory).items() if key not in _IRRELEVANT_KEYS}
    digest = xxhash.xxh3_64(json.dumps(config, sort_keys=True).encode())
    for path in _weight_files(directory):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        for part in _sampled_content(path):
            digest.update(part)
    return digest.intdigest()


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ConfigError(f"no checkpoint directory at {directory}")
    return _read_json(directory / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise start_fault(f"the checkpoint lacks a readable {path}: {error}", error) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def _require_supported(directory: Path, raw: dict[str, Any]) -> None:
    if contradiction := disagreement(raw, _model_types()):
        raise ConfigError(f"{directory}/config.json contradicts itself: {contradiction}")


def _model_types() -> dict[str, list[str]]:
    of_architecture: dict[str, list[str]] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in (names,) if isinstance(names, str) else names:
            of_architecture.setdefault(name, []).append(model_type)
    return of_architecture


def _require_causal(directory: Path, config: PreTrainedConfig) -> None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = f"{config.architectures or config.model_type}"
        raise ConfigError(f"{directory} is of {kind}, of which transformers has no model that generates text")
    text = config.get_text_config()
    looks_ahead = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    if getattr(text, "is_causal", True) is False or looks_ahead:
        raise ConfigError(f"{directory} attends in both directions: its KV depends on what comes later")
    for kind in _rope_types(text):
        if kind in _UNSUPPORTED_ROPE:
            raise ConfigError(f"{directory} uses rotary embedding {kind!r}, which is not supported")


def _rope_types(config: PreTrainedConfig) -> list[Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]


def _own_dtype(directory: Path, raw: dict[str, Any], is_quantized: bool) -> str:
    parts = [raw, raw["text_config"]] if isinstance(raw.get("text_config"), dict) else [raw]
    named = next((part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key)), None)
    if named:
        return str(named)
    if is_quantized:
        return "bfloat16"
    with _weight_files(directory)[0].open("rb") as file:
        first = next(iter(_tensors(_read_header(file))), None)
    if first is None:
        raise ConfigError(f"{directory} holds no weights")
    name = str(first["dtype"])
    return _HEADER_DTYPES.get(name, name)


def _weight_files(directory: Path) -> list[Path]:
    if (file := gguf_weights_of(directory)) is not None:
        return [file]
    index = directory / INDEX
    whole = directory / WEIGHTS
    is_whole = whole.exists() or not index.exists()
    names = {whole.name} if is_whole else _indexed_files(index)
    missing = sorted(name for name in names if not (directory / name).is_file())
    if missing or not names:
        raise ConfigError(f"{directory} has no safetensors weights: missing {missing}")
    return [directory / name for name in sorted(names)]


def _indexed_files(index: Path) -> set[str]:
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ConfigError(f"{index} has no weight_map that names a file for each weight")
    return set(files.values())


def _sampled_content(path: Path) -> Iterator[bytes]:
    if path.suffix == ".gguf":
        yield from sampled_gguf(path)
        return
    with path.open("rb") as file:
        header = _read_header(file)
        data_start = file.tell()
        yield header
        for tensor in _tensors(header):
            begin, end = tensor["data_offsets"]
            for offset in sorted({begin, (begin + end) // 2}):
                file.seek(data_start + offset)
                yield file.read(min(_SAMPLE_BYTES, end - offset))


def _read_header(file: BinaryIO) -> bytes:
    """Return the JSON header, and leave the file's position at the tensors.

    The format is defined at github.com/huggingface/safetensors.
    """
    prefix = file.read(8)
    size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    header = file.read(size) if 0 <= size <= 100_000_000 else b""  # The limit is the format's own.
    if len(header) != size:
        raise ConfigError(f"{file.name} is not a safetensors file")
    return header


def _tensors(header: bytes) -> Iterator[dict[str, Any]]:
    try:
        tensors = json.loads(header)
    except ValueError as error:
        raise ConfigError(f"a safetensors header is not JSON: {error}") from error
    if not isinstance(tensors, dict):
        raise ConfigError("a safetensors header is no JSON object")
    tensors.pop("__metadata__", None)
    if wrong := [name for name, tensor in tensors.items() if not _is_entry(tensor)]:
        raise ConfigError(f"a safetensors header does not tell what {wrong[0]} is, or where")
    return (tensor for _, tensor in sorted(tensors.items()))


def _is_entry(tensor: Any) -> bool:
    if not isinstance(tensor, dict) or not isinstance(tensor.get("dtype"), str):
        return False
    offsets = tensor.get("data_offsets")
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
        return False
    return bool(0 <= offsets[0] <= offsets[1])


@contextmanager
def reporting_progress(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Log `weights_loading done=120 of=290` every two seconds while transformers loads a model's weights.

    It can report one model at a time, since the hook belongs to the process.
    """
    before = set_tqdm_hook(
        lambda make, arguments, fields: _reported(make(*arguments, **fields), arguments, clock)
    )
    try:
        yield
    finally:
        set_tqdm_hook(before)


def _reported(bar: Any, arguments: tuple[Any, ...], clock: Callable[[], float]) -> Any:
    total = len(arguments[0]) if arguments and hasattr(arguments[0], "__len__") else 0
    return _ReportedBar(bar, total, clock) if total else bar


class _ReportedBar:
    """This replaces the bar: transformers iterates over it, or reads attributes of a bar."""

    def __init__(self, bar: Any, total: int, clock: Callable[[], float]) -> None:
        self._bar, self._total, self._clock = bar, total, clock

    def __iter__(self) -> Iterator[Any]:
        reported_s = self._clock()
        for done, item in enumerate(self._bar):
            if (now := self._clock()) - reported_s >= _REPORT_EVERY_S:
                reported_s = now
                log.info("weights_loading done=%d of=%d", done, self._total)
            yield item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)
