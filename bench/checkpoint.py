"""The checkpoint that benchmarks run: float32, random weights."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.cli.make_model import make_model


@dataclass(frozen=True, slots=True)
class Size:
    """`hidden` is a multiple of twice the `heads`."""

    layers: int = 8
    hidden: int = 512
    max_context_tokens: int = 8192
    heads: int = 8
    kv_heads: int = 4


@contextmanager
def checkpoint(size: Size) -> Iterator[Path]:
    """A checkpoint directory that is there while the context is."""
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as directory:
        make_model(
            Path(directory),
            "llama",
            hidden_size=size.hidden,
            num_layers=size.layers,
            num_heads=size.heads,
            num_kv_heads=size.kv_heads,
            max_context_tokens=size.max_context_tokens,
        )
        yield Path(directory)
