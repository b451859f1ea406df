"""Two computations are compared by what they gave for random numbers."""

import torch
from torch import Tensor

# In half precision what is right rounds one in a hundred numbers to another neighbour; what rounds otherwise
# does so with one in three.
MOST_UNLIKE = 0.05


def unlike(given: object, expected: Tensor) -> float:
    """Return the share of numbers that are not the same; 1 where they differ by more than rounding."""
    if not isinstance(given, Tensor) or given.shape != expected.shape or given.dtype != expected.dtype:
        return 1.0
    if expected.dtype == torch.float32:
        return float(not torch.allclose(given, expected, rtol=1e-5, atol=1e-6))
    step = 2 * torch.finfo(expected.dtype).eps
    if not torch.allclose(given.float(), expected.float(), rtol=step, atol=1e-6):
        return 1.0
    return float((given != expected).float().mean())
