"""The model's products alone, as cuBLAS computes them in half precision and torch's scaled product in FP8.

Each is captured over so many copies of its weights that none is still in the L2 cache. What these take is the
floor of a step, beside reading K and V.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear

from bench.engine import seconds
from bench.gpu.captured import Captured, finish
from bench.report import Row

ROWS = (1, 16, 64, 2048)
_SPREAD_BYTES = 256 << 20  # far more than an L2 cache of 50 or 60 MB holds
_TIMED = 7
_FP8 = torch.float8_e4m3fn


def shapes(hidden: int, group: int, vocab_size: int) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each product of a model as `make-model` makes them."""
    key_values = hidden // group
    return {
        "q": (hidden, hidden),
        "k": (key_values, hidden),
        "qkv": (hidden + 2 * key_values, hidden),
        "gate": (2 * hidden, hidden),
        "gate, up": (4 * hidden, hidden),
        "down": (hidden, 2 * hidden),
        "head": (vocab_size, hidden),
    }


def product_rows(
    rows: Sequence[int], hidden: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[Row]:
    return [
        _row(name, num_rows, outputs, inputs, how, device, dtype)
        for name, (outputs, inputs) in shapes(hidden, 2, 512).items()
        for num_rows in rows
        for how in ("linear", "fp8 rows", "fp8")
        if how == "linear" or name in ("qkv", "gate, up", "down")
    ]


def copy_row(device: torch.device, num_bytes: int = 2 << 30) -> Row:
    """Return how fast the device copies, bytes read and written."""
    if device.type == "cpu":
        num_bytes = 1 << 20
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    took_s = _seconds(lambda: target.copy_(source), device)
    return _columns("copy", 0, "copy", took_s, 2 * num_bytes, 0)


def _row(
    name: str, num_rows: int, outputs: int, inputs: int, how: str, device: torch.device, dtype: torch.dtype
) -> Row:
    itemsize = 1 if how.startswith("fp8") else dtype.itemsize
    count = max(1, min(64, _SPREAD_BYTES // (outputs * inputs * itemsize)))
    if device.type == "cpu":
        count = 2
    try:
        product = _product(how, num_rows, outputs, inputs, count, device, dtype)
        took_s = _seconds(product, device) / count
    except Exception as error:  # what this torch or this GPU does not have is part of the answer
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:70]
        return _columns(name, num_rows, f"{how}: {reason}", 0.0, 0, 0)
    moved = (outputs * inputs + num_rows * inputs) * itemsize + 2 * num_rows * outputs
    return _columns(name, num_rows, how, took_s, moved, 2 * num_rows * outputs * inputs)


def _columns(name: str, num_rows: int, how: str, took_s: float, moved: int, operations: int) -> Row:
    return {
        "product": name,
        "rows": num_rows,
        "how": how,
        "us": 1e6 * took_s,
        "GB/s": moved / took_s / 1e9 if took_s else 0.0,
        "TFLOP/s": operations / took_s / 1e12 if took_s else 0.0,
    }


def _product(
    how: str,
    num_rows: int,
    outputs: int,
    inputs: int,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], object]:
    given = torch.randn(num_rows, inputs, device=device, dtype=dtype)
    weights = [torch.randn(outputs, inputs, device=device, dtype=dtype) for _ in range(count)]
    if how == "linear":
        return lambda: [linear(given, weight) for weight in weights]
    narrow, narrow_weights = given.to(_FP8), [weight.to(_FP8) for weight in weights]
    scales = _scales(how, num_rows, outputs, device)
    return lambda: [_scaled(narrow, weight, *scales, dtype) for weight in narrow_weights]


def _scales(how: str, num_rows: int, outputs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if how == "fp8":
        return torch.ones((), device=device), torch.ones((), device=device)
    return torch.ones(num_rows, 1, device=device), torch.ones(1, outputs, device=device)


def _scaled(given: Tensor, weight: Tensor, scale: Tensor, of_weight: Tensor, dtype: torch.dtype) -> Tensor:
    product: Tensor = torch._scaled_mm(
        given, weight.t(), scale_a=scale, scale_b=of_weight, out_dtype=dtype, use_fast_accum=True
    )
    return product


@torch.inference_mode()
def _seconds(action: Callable[[], object], device: torch.device) -> float:
    captured = Captured(action, device)

    def run() -> None:
        captured.replay()
        finish(device)

    run()
    return median(seconds(run) for _ in range(_TIMED))
