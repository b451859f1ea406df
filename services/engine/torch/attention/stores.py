"""K and V of a step are stored in their pages."""

import torch
from torch import Tensor

from services.engine.torch.attention.kernels.store_kernel import store_tokens
from services.engine.torch.attention.step_view import ReachView, as_numpy


def store_layer(key: Tensor, value: Tensor, view: ReachView, layer: int) -> None:
    """Store the step's `key` and `value`, [1, num_kv_heads, total, ..]; `layer` is one of the pool's."""
    if view.numbers is not None:
        key, value = view.kv.rounded(key), view.kv.rounded(value)
        keys, values = (as_numpy(numbers)[0].transpose(1, 0, 2) for numbers in (key, value))
        store_tokens(keys, values, view.numbers, view.kv.shape, layer, view.slots)
        return
    if view.store is not None:
        view.store(key[0].transpose(0, 1), value[0].transpose(0, 1), view.kv, layer, *view.slot_tensors)
        return
    for numbers, pages in zip((key, value), view.kv.layer(layer), strict=True):
        store(view.kv.rounded(numbers), pages, view)


def store(numbers: Tensor, pages: Tensor, view: ReachView) -> None:
    """Store the step's `numbers`, [1, num_kv_heads, total, head_dim]; `pages` are a layer's K or V."""
    rows, token_pages, token_slots = view.slot_tensors
    of_tokens = numbers[0].transpose(0, 1)
    if len(rows) < len(of_tokens) or view.static_slots is not None:
        of_tokens = of_tokens[rows]
    put(of_tokens, pages, token_pages, token_slots)


def put(numbers: Tensor, pages: Tensor, token_pages: Tensor, token_slots: Tensor) -> None:
    """Put [num_tokens, num_kv_heads, head_dim] into a layer's pages, each token's into its page and slot."""
    if pages.itemsize == 1:  # torch puts no numbers of 8 bits in places, but bytes
        pages, numbers = pages.view(torch.uint8), numbers.view(torch.uint8)
    pages[token_pages, :, token_slots] = numbers
