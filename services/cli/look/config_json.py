"""A command is given a checkpoint, and reads its config.json."""

import json
from pathlib import Path
from typing import Any

from services.values.errors import ConfigError


def read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return content
