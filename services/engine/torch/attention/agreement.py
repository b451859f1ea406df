"""Whether what attends on a device is right, tried on random pages of the pool's own layout at the start.

    a plain softmax, on the host  <--require_causal-->  the gather path  <--require_agreement-->  a kernel

A kernel that is wrong can be done without, the gather path cannot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from services.engine.paged.runner import Chunk
from services.engine.start_fault import start_fault
from services.engine.torch.attention.paged_attention import paged_attention
from services.engine.torch.attention.parts import OnDevice
from services.engine.torch.attention.step_view import view_step
from services.values.errors import ConfigError
from services.values.kv import PageId
from services.values.request import SamplingParams

# How far two ways to compute the same may differ: relative, and absolute for numbers below 1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.004}
# What a token too many or too few changes is ten times that; no rounding comes near it.
_CAUSAL_TOLERANCE = 0.1
_NUM_LAYERS, _LAYER = 2, 1
# Chunks (start, length) that end within, at and one past what kernels take at a time.
_SPANS = ((0, 150), (0, 64), (200, 185), (64, 64), (63, 2), (96, 1))


class KernelWrong(Exception):
    """A kernel does not compute what the gather path does."""


@dataclass(frozen=True, slots=True)
class _Example:
    """A step over a pool of random pages, in which slots that nobody reads hold NaN."""

    pool: Tensor
    chunks: Sequence[Chunk]
    query: Tensor  # [1, num_heads, total, head_dim]
    key: Tensor  # [1, num_kv_heads, total, head_dim]
    value: Tensor


def require_agreement(on_device: OnDevice, kv: Tensor) -> None:
    """Compile for the layout of `kv`, compare with the gather path; `kv` is not touched.

    Raises KernelWrong, and whatever compiling and running raises.
    """
    example = _example(kv, on_device.num_heads, _tree_of_readers(kv.shape[4]))
    expected = _attend(example, None)
    excess = _excess(_attend(example, on_device), expected)
    if not excess <= _TOLERANCE[kv.dtype]:  # nor for NaN
        raise KernelWrong(f"differs from the gather path by {excess:.2g} of {_TOLERANCE[kv.dtype]:.2g}")


def require_causal(kv: Tensor, num_heads: int) -> None:
    """Compare the gather path, which serves prompts, with a plain softmax; `kv` is not touched.

    Raises:
        ConfigError: it differs, or cannot compute.
        Unavailable: it cannot now: memory is short, or the device is lost.
    """
    try:
        example = _example(kv, num_heads, _prompts(kv.shape[4]))
        got = _attend(example, None).cpu()
    except RuntimeError as error:
        raise start_fault(f"this torch cannot attend on {kv.device}: {error}", error) from error
    excess = _excess(got, _attend_plainly(example))
    if not excess <= _CAUSAL_TOLERANCE:  # nor for NaN
        raise ConfigError(
            f"this torch does not attend as it should on {kv.device}: prompts differ from a plain softmax "
            f"by {excess:.2g}"
        )


def _example(kv: Tensor, num_heads: int, chunks: Sequence[Chunk]) -> _Example:
    """For the layout of `kv`."""
    num_kv_heads, page_size, head_dim = kv.shape[3:]
    generator = torch.Generator(kv.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=kv.device).to(kv.dtype)

    num_pages = 1 + max(max(chunk.pages) for chunk in chunks)
    pool = random(num_pages, _NUM_LAYERS, 2, num_kv_heads, page_size, head_dim)
    for chunk in chunks:
        if chunk.end % page_size:
            pool[chunk.pages[-1], ..., chunk.end % page_size :, :] = torch.nan
    total = sum(len(chunk.token_ids) for chunk in chunks)
    # Scores of some size, so that few tokens decide: one that is left out is seen.
    query = 4 * random(1, num_heads, total, head_dim)
    key, value = random(1, num_kv_heads, total, head_dim), random(1, num_kv_heads, total, head_dim)
    return _Example(pool, chunks, query, key, value)


def _attend(example: _Example, in_place: OnDevice | None) -> Tensor:
    """Float32 [total, num_heads, head_dim]. Stores the step's keys and values in the example's pool."""
    view = view_step(example.pool, example.chunks, in_place)
    layer = SimpleNamespace(layer_idx=_LAYER)
    output, _ = paged_attention(
        layer, example.query, example.key, example.value, None, scaling=_scaling(example), paged=view
    )
    return output[0].float()


def _attend_plainly(example: _Example) -> Tensor:
    """As `_attend`, once that has stored the keys and values; on the host."""
    outputs: list[Tensor] = []
    offset = 0
    for chunk in example.chunks:
        rows = slice(offset, offset + len(chunk.token_ids))
        offset = rows.stop
        content = example.pool[list(chunk.pages), _LAYER].cpu().float()
        keys, values = content.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : chunk.end]
        queries = example.query[0, :, rows].cpu().float().unflatten(0, (len(keys), -1))
        scores = torch.einsum("hgqd,hkd->hgqk", queries, keys) * _scaling(example)
        positions = torch.arange(chunk.end)
        is_later = positions > positions[chunk.start :, None]
        weights = scores.masked_fill(is_later, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hgqk,hkd->qhgd", weights, values).flatten(1, 2))
    return torch.cat(outputs)


def _scaling(example: _Example) -> float:
    return 1 / math.sqrt(example.query.shape[3])


def _excess(got: Tensor, expected: Tensor) -> float:
    excess: float = ((got - expected).abs() / expected.abs().clamp(min=1)).max().item()
    return excess


def _prompts(page_size: int) -> list[Chunk]:
    """Each on pages of its own, against the token order."""
    chunks, next_page = [], 0
    for start, length in _SPANS:
        end_page = next_page - (-(start + length) // page_size)
        chunks.append(_chunk(length, start, range(next_page, end_page)[::-1]))
        next_page = end_page
    return chunks


def _tree_of_readers(page_size: int) -> list[Chunk]:
    """Twenty readers of a prefix, three of them of a longer one, odd tails, and who reads alone."""
    outer, inner = (list(range(-(-num_tokens // page_size))) for num_tokens in (300, 40))
    next_page = len(outer) + len(inner)
    inner = [len(outer) + page for page in inner]
    chunks = []

    def add(prefix: list[int], num_tokens: int, length: int = 1) -> None:
        nonlocal next_page
        end_page = next_page - (-num_tokens // page_size)
        pages, next_page = [*prefix, *range(next_page, end_page)], end_page
        chunks.append(_chunk(length, len(prefix) * page_size + num_tokens - length, pages))

    for i in range(17):
        add(outer, 1 + 7 * i % (2 * page_size))
    add([], page_size + 3, length=3)  # a prompt's
    for i in range(3):
        add(outer + inner, 1 + i % page_size)
    for num_tokens in (1, page_size, page_size + 1, 333):
        add([], num_tokens)
    return chunks


def _chunk(length: int, start: int, pages: Sequence[int]) -> Chunk:
    return Chunk(range(length), start, list(map(PageId, pages)), sample=False, sampling=SamplingParams())
