"""This replaces SGLang's package of CUDA kernels where there is no GPU.

On a CPU SGLang 0.5.23 imports eight names from it and, for dense models on a CPU without AMX, calls none.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's kernels, which are not installed")

    return missing
