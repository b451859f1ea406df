"""A command is given a checkpoint, and reads its config.json."""

import json
from pathlib import Path
from typing import Any

from services.model.quantization import MODELOPT_FILE, with_modelopt
from services.values.errors import ConfigError


def read_config(path: Path) -> dict[str, Any]:
    """Return it, with how weights are quantized where that is in a file beside it. Raises ConfigError."""
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
