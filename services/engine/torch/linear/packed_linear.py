"""Linear layers for the CPU keep their weights in the order in which they are read.

With one thread and float32 that are panels (linear_kernel.py). Else it is oneDNN's order, for it shares the
work among torch's threads and knows what the processor can do with bfloat16. A plain weight goes to a BLAS
that packs it anew in every call: for the few rows of a decode step that takes twice as long as reading the
weight once.
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from services.engine.torch.linear.linear_kernel import multiply, pack
from services.engine.torch.linear.shared_weights import SharedWeights

# So many rows are expected when oneDNN chooses the order. For one row it would be another, and wrong for all
# others.
_TYPICAL_ROWS = 16
# oneDNN compiles code for every number of rows and keeps that of the last 1,024 shapes: with prompts of all
# lengths it takes 0.7 GB, and 0.6 ms for each new shape. So more rows than the first of these are filled up
# to a multiple of the second; less coarsely for batches, where every row is felt.
_ROW_STEPS = ((64, 16), (16, 4))
# torch's activations compute so many numbers at once. Rows of other widths have gaps between: as one stretch
# of memory they would end in numbers that are computed by another formula, and how many there are decides
# which.
_COLUMN_STEP = 64
# In an order made for many rows fewer take longer than these (8 layers of hidden size 512, two threads: one
# row takes 6.1 ms, four take 5.1).
_FEWEST_ROWS = 4


class PanelLinear(nn.Module):
    """This computes what a float32 nn.Linear does, and keeps no weight in the usual order."""

    def __init__(self, linear: nn.Linear, weights: SharedWeights | None = None) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach().numpy()
        panels = pack(linear.weight.detach().numpy(), bias)
        if weights is not None:
            panels = panels._replace(numbers=weights.shared(panels.numbers.view(np.uint8)).view(np.float32))
        self._panels = panels

    def forward(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(multiply(rows.numpy(), self._panels))

    __call__ = forward  # nobody hooks it, and a module's own takes as long as the rest of the call


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        extra = -linear.out_features % _COLUMN_STEP
        weight = pad(linear.weight.detach(), (0, 0, 0, extra))
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._bias = None if linear.bias is None else pad(linear.bias.detach(), (0, extra))
        self._num_columns = linear.out_features

    def forward(self, rows: Tensor) -> Tensor:
        num_rows = rows.shape[-2]
        step = next((step for more_than, step in _ROW_STEPS if num_rows > more_than), 1)
        extra = max(-num_rows % step, _FEWEST_ROWS - num_rows)
        if extra:
            rows = pad(rows, (0, 0, 0, extra))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product[..., :num_rows, : self._num_columns]


def pack_linears(
    module: nn.Module,
    num_threads: int,
    keep: Collection[nn.Module] = (),
    weights: SharedWeights | None = None,
) -> None:
    """Replace every linear layer below `module` but those to `keep`, whose weights somebody reads.

    Nothing happens where this torch or processor cannot. `num_threads` is how many torch has. Panels are kept
    in `weights`, if there are some.
    """
    for name, child in module.named_children():
        if type(child) is not nn.Linear:  # a subclass computes something else (Llama 4's router)
            pack_linears(child, num_threads, keep, weights)
        elif child not in keep:
            setattr(module, name, _packed(child, num_threads, weights))


def _packed(linear: nn.Linear, num_threads: int, weights: SharedWeights | None) -> nn.Module:
    weight = linear.weight
    if num_threads == 1 and weight.device.type == "cpu" and weight.dtype == torch.float32:
        return PanelLinear(linear, weights)
    return PackedLinear(linear) if _can_pack(weight) else linear


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(weight.dtype == torch.float32)
