"""Latents: kept in pages, expanded by the model, attended to sequence by sequence."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.torch.attention.paging import empty, view_of
from services.engine.paged.model_runner import Chunk
from services.engine.torch.attention.paged_attention import paged_attention, store_and_gather
from services.engine.torch.attention.paged_kv import PageShape
from services.values.request import SamplingParams

LATENT, ROTATED, HEADS = 6, 4, 3
K_DIM, V_DIM = 8 + ROTATED, 5
SCALING = 0.3
expanding = torch.randn(LATENT, HEADS * (8 + V_DIM), generator=torch.Generator().manual_seed(1))


def expand(latents, rotated):
    """Expand as DeepSeek-V3 does: keys are what comes of the latent, and the rotated one, for all heads."""
    keys, values = (
        (latents @ expanding.to(latents.dtype))[0, 0].unflatten(-1, (HEADS, -1)).split([8, V_DIM], -1)
    )
    keys = torch.cat([keys, rotated[0, 0][:, None].expand(-1, HEADS, -1)], dim=-1)
    return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def step(kv, chunks, query, latents, rotated):
    view = view_of(kv, chunks, layer=1)
    keys, values = expand(*store_and_gather(view, 1, latents, rotated))
    output, _ = paged_attention(SimpleNamespace(), query, keys, values, None, scaling=SCALING, paged=view)
    return output[0]


def plainly(query, latents, rotated):
    """A whole sequence, causal."""
    keys, values = expand(latents, rotated)
    scores = query[0] @ keys[0].transpose(1, 2) * SCALING
    is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(is_later, -torch.inf).softmax(-1) @ values[0]).transpose(0, 1)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_however_sequences_are_cut_into_steps_they_are_attended_to_whole(
    lengths, cuts, page_size, seed, dtype
):
    generator = torch.Generator().manual_seed(seed)
    shape = PageShape(2, 1, page_size, LATENT + ROTATED, 0)
    most = 30 // page_size + 1
    order = torch.randperm(most * len(lengths), generator=generator).tolist()
    kv = empty(shape, num_pages=len(order), dtype=dtype)
    kv.numbers.fill_(torch.nan)
    numbers = [
        [
            torch.randn(1, heads, length, dim, generator=generator).to(dtype)
            for heads, dim in ((HEADS, K_DIM), (1, LATENT), (1, ROTATED))
        ]
        for length in lengths
    ]
    done, got, turn = [0] * len(lengths), [[] for _ in lengths], 0
    while done != lengths:
        parts, chunks, running = [], [], []
        for i, (own, length) in enumerate(zip(numbers, lengths, strict=True)):
            end = min(length, done[i] + cuts[turn % len(cuts)])
            turn += 1
            if done[i] < end:
                running.append(i)
                pages = order[i * most : (i + 1) * most]
                ids = range(end - done[i])
                chunks.append(Chunk(ids, done[i], pages, sample=False, sampling=SamplingParams()))
                parts.append([of[:, :, done[i] : end] for of in own])
                done[i] = end
        output = step(kv, chunks, *(torch.cat(of, dim=2) for of in zip(*parts, strict=True)))
        for i, rows in zip(running, output.split([len(c.token_ids) for c in chunks]), strict=True):
            got[i].append(rows)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.01}[dtype]
    for own, rows in zip(numbers, got, strict=True):
        # What differs is rounding of products, not what is kept: so the plain one is of the same numbers.
        expected = plainly(*(of.float() for of in own))
        torch.testing.assert_close(torch.cat(rows).float(), expected, atol=tolerance, rtol=tolerance)
    assert kv.layer(0)[0].isnan().all()
