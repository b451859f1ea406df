"""SGLang itself decides, before it starts, whether a model's windows have memory of their own.

`python -m services.engine.sglang.inside.window_memory DIR` prints true or false.

It runs in a process of its own, as SGLang's libraries take seconds to load. SGLang's list of architectures
decides, whatever config.json states about windows: for a model that is not in it, every layer stores the KV
of every token.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.configs.model_config import is_hybrid_swa_model


def has_window_memory(config: dict[str, Any]) -> bool:
    text = SimpleNamespace(**(config.get("text_config") or config))
    return bool(is_hybrid_swa_model(list(config.get("architectures") or ()), text))


if __name__ == "__main__":
    print(json.dumps(has_window_memory(json.loads((Path(sys.argv[1]) / "config.json").read_text()))))
