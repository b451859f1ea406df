"""This module writes a GGUF file as a checkpoint in float32."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.model.gguf import read_gguf
from services.model.gguf_model import GgufModel, model_of
from services.settings.gguf_directory import mapped, write_configs
from services.settings.known_models import WEIGHTS
from services.values.errors import ConfigError

# It is called with what, the bytes that are done, and of how many.
Follow = Callable[[str, int, int], None]
_FLOAT_BYTES = 4


def write_checkpoint(
    file: Path, directory: Path, follow: Follow, sampling: Mapping[str, float] | None = None
) -> None:
    """Write it; `sampling` is for its generation_config.json. One tensor is in memory at a time.

    Raises:
        ConfigError: It cannot be read, or not be converted; the message says why.
        OSError: It cannot be written.
    """
    with mapped(file) as data:
        try:
            read = model_of(read_gguf(data), data, sampling=sampling)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
        write_configs(read, directory)
        _write_weights(directory / WEIGHTS, read, data, follow)


def _write_weights(path: Path, read: GgufModel, data: Any, follow: Follow) -> None:
    """The file is safetensors: a header's length, the header in JSON, and one tensor behind another."""
    stated: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in read.weights:
        start, end = end, end + _FLOAT_BYTES * weight.tensor.num_values
        stated[weight.name] = {
            "dtype": "F32",
            "shape": list(weight.tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(stated).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for weight in read.weights:
            file.write(weight.floats(data).data)
            follow("converting", stated[weight.name]["data_offsets"][1], end)
        file.flush()
        os.fsync(file.fileno())  # It is synced before the directory has its name.
