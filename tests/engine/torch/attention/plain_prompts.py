"""Packed prompts need no GPU with these: varlen_attn goes chunk by chunk, and pages are copied one by one."""

import math

import torch


def gather_plainly(reads, num_tokens, kv, layer):
    packed = []
    for pages in kv.layer(layer):
        shape = num_tokens, pages.shape[1], pages.shape[3]
        rows = torch.full(shape, torch.nan, dtype=kv.compute_dtype, device=pages.device)
        for page, first, end, row in reads.tolist():
            rows[row : row + end - first] = pages[page, :, first:end].transpose(0, 1)
        packed.append(rows)
    return tuple(packed)


def varlen_plainly(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """The arguments are those of varlen_attn, the sums are in float64."""
    for starts, numbers, longest in [(cu_seq_q, query, max_q), (cu_seq_k, key, max_k)]:
        assert starts.dtype == torch.int32
        assert starts[0] == 0
        assert starts[-1] == len(numbers)
        assert max(starts.diff().tolist()) == longest
    assert numbers_are_aligned(query, key, value)
    outputs, log_sums = [], []
    of_key = range(len(cu_seq_q) - 1)
    for rows, seen in [(slice(*cu_seq_q[i : i + 2]), slice(*cu_seq_k[i : i + 2])) for i in of_key]:
        output, of_rows = _attend(query[rows], key[seen], value[seen], scale, window_size)
        outputs.append(output)
        log_sums.append(of_rows)
    output = torch.cat(outputs).to(query.dtype)
    if return_aux is None or not return_aux.lse:
        return output
    return output, torch.cat(log_sums, dim=1).float()


def attend_rows_plainly(query, keys, values, row_starts, seen_starts, longest, window, scores):
    """The arguments are those of prompt_kernel.attend_rows, the sums are in float64; other rows get 0."""
    assert max(row_starts.diff().tolist()) <= longest
    output = query.new_zeros(*query.shape[:2], values.shape[2])
    for i in range(len(row_starts) - 1):
        rows, seen = slice(*row_starts[i : i + 2]), slice(*seen_starts[i : i + 2])
        if seen.start < seen.stop:
            size = (window - 1, 0) if window else (-1, 0)
            output[rows] = _attend(query[rows], keys[seen], values[seen], scores.scaling, size, scores)[0].to(
                query.dtype
            )
    return output


def numbers_are_aligned(*tensors):
    return all(
        numbers.stride(-1) == 1
        and not any(at % 8 for at in (*numbers.stride()[:-1], numbers.storage_offset()))
        for numbers in tensors
    )


def _attend(query, key, value, scale, window_size, capped=None):
    group = query.shape[1] // key.shape[1]
    keys, values = (numbers.double().repeat_interleave(group, 1) for numbers in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    if capped is not None and capped.softcap:
        scores = capped.softcap * torch.tanh(scores / capped.softcap)
    own = torch.arange(len(query))[:, None] + len(key) - len(query)
    other = torch.arange(len(key))
    before, after = window_size
    is_seen = other <= own + after if after >= 0 else torch.ones(len(query), len(key), dtype=torch.bool)
    if before >= 0:
        is_seen &= other >= own - before
    scores.masked_fill_(~is_seen, -math.inf)
    if capped is not None and capped.sinks is not None:
        sinks = capped.sinks.double()[:, None, None].expand(-1, len(query), 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return torch.einsum("hqk,khd->qhd", weights, values), None
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)
