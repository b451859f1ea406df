"""Linear layers for the CPU, with their weights in the order in which oneDNN reads them.

torch multiplies by a plain weight through a BLAS that packs it anew in every call: for the few rows of a
decode step that takes twice as long as reading the weight once (8 layers of hidden size 512, float32, two
cores: 16 rows 9.5 ms against 4.4 ms, 512 rows 130 ms against 101 ms).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

# How many rows to expect when the order is chosen. For one row it would be another, and wrong for all others.
_TYPICAL_ROWS = 16
# oneDNN compiles code for every number of rows and keeps that of the last 1,024 shapes: with prompts of all
# lengths 0.7 GB, and 0.6 ms for each new shape. So more rows than the first of these are filled up to a
# multiple of the second; less coarsely for batches, where every row is felt.
_ROW_STEPS = ((64, 16), (16, 4))


class PackedLinear(nn.Module):
    """Computes what the nn.Linear it is made of does; keeps no weight in the usual order."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._bias = linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        num_rows = rows.shape[-2]
        extra = -num_rows % next((step for more_than, step in _ROW_STEPS if num_rows > more_than), 1)
        if extra:
            rows = pad(rows, (0, 0, 0, extra))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product[..., :num_rows, :] if extra else product


def pack_linears(module: nn.Module) -> None:
    """Replace every linear layer below `module`; nothing happens where this torch or processor cannot."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and _can_pack(child.weight):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(weight.dtype == torch.float32)
