"""The few highest of rows of values are found: only what may be among them comes to the host."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, tensor

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_STRIPES = 64  # see floors


def floors(values: Tensor, counts: Sequence[int]) -> Tensor:
    """Return for each row a value that at least counts[row] are not below, and few more: [num_rows, 1].

    So many of the stripes that a row is cut into have a highest value at least as high.
    """
    width, most = values.shape[1] // _STRIPES, max(1, *counts)
    if width < most:
        return values.new_full((len(values), 1), -float("inf"))
    highest_of = values[:, : _STRIPES * width].unflatten(1, (_STRIPES, width)).amax(1).topk(most).values
    which = tensor([max(1, count) - 1 for count in counts], device=values.device)
    return highest_of.gather(1, which[:, None])


def at_least(floors: Tensor, values: Tensor) -> list[tuple[Ids, Floats]]:
    """Return for each row the ids, ascending, whose value is not below the floor, and these values."""
    num_rows, vocab_size = values.shape
    if values.device.type == "cpu":  # numpy takes a fourth of torch's time
        hits = np.flatnonzero(values.numpy() >= floors.numpy())
        high = values.numpy().ravel()[hits]
    else:
        on_device = (values >= floors).flatten().nonzero()[:, 0]
        hits, high = on_device.cpu().numpy(), values.flatten()[on_device].cpu().numpy()
    bounds = np.searchsorted(hits, np.arange(num_rows + 1) * vocab_size).tolist()
    ids = hits % vocab_size
    return [(ids[start:end], high[start:end]) for start, end in pairwise(bounds)]


def highest(values: Floats, count: int) -> Ids:
    """Return the indices of the `count` highest values, highest first, the lower one first among equals."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]
