"""Pools of tensors, and a step over one of them, without a runner."""

import torch

from services.engine.torch.attention.paged_kv import PagedKv, PageShape
from services.engine.torch.attention.step_view import LayerPlace, PagedLayers, Reach, view_step


def paged(alike):
    """Page numbers [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]; the memory is the same."""
    _, num_layers, _, num_kv_heads, page_size, head_dim = alike.shape
    return PagedKv(alike.view(-1), PageShape(num_layers, num_kv_heads, page_size, head_dim, head_dim))


def alike(kv):
    """The other way round: where K and V are alike."""
    num_layers, num_kv_heads, page_size, head_dim, v_head_dim = kv.shape
    assert head_dim == v_head_dim
    return kv.numbers.view(-1, num_layers, 2, num_kv_heads, page_size, head_dim)


def empty(shape, num_pages=1, dtype=torch.float32):
    return PagedKv(torch.zeros(num_pages * shape.page_numbers, dtype=dtype), shape)


class OneLayer:
    """A cache that is asked for one layer again and again."""

    def __init__(self, layer_idx, stores=True):
        self.taken = layer_idx, stores

    def take(self):
        return self.taken


def layers_of(kv, in_place=None, reach=Reach(0), packing=None):  # noqa: B008
    places = {index: LayerPlace(reach, index) for index in range(kv.shape.num_layers)}
    num_pools = reach.pool + 1
    return PagedLayers([kv] * num_pools, [in_place] * num_pools, places, [packing] * num_pools)


def view_of(kv, chunks, in_place=None, reach=Reach(0), layer=1, packing=None):  # noqa: B008
    """A StepView of which only this reach is asked."""
    return view_step(layers_of(kv, in_place, reach, packing), chunks, OneLayer(layer))


def reach_view_of(kv, chunks, in_place=None, reach=Reach(0), packing=None):  # noqa: B008
    return view_of(kv, chunks, in_place, reach, packing=packing).by_reach[reach]
