"""The checkpoint that benchmarks run: float32, random weights.

python -m bench.checkpoint DIR [--layers ... --hidden ...]      for several of them: --checkpoint=DIR
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from services.cli.model.make_model import make_model


@dataclass(frozen=True, slots=True)
class Size:
    """`hidden` is a multiple of twice the `heads`."""

    layers: int = 8
    hidden: int = 512
    max_context_tokens: int = 8192
    heads: int = 8
    kv_heads: int = 4


@contextmanager
def checkpoint(size: Size, directory: Path | None = None) -> Iterator[Path]:
    """`directory`, if one was made before; else a new one of that size, there while the context is."""
    if directory is not None:
        yield directory
        return
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as temporary:
        write(Path(temporary), size)
        yield Path(temporary)


def write(directory: Path, size: Size) -> None:
    make_model(
        directory,
        "llama",
        hidden_size=size.hidden,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        max_context_tokens=size.max_context_tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the checkpoint that several benchmarks will run.")
    parser.add_argument("directory", type=Path)
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    arguments = vars(parser.parse_args())
    write(arguments.pop("directory"), Size(**arguments))


if __name__ == "__main__":
    main()
