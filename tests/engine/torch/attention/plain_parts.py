"""attend_parts, of a PartsView, without a kernel: part by part and row by row."""

import torch


def attend_parts_plainly(view, query, kv, layer, scaling, output):
    group = query.shape[1] // kv.shape[3]
    keys, values = kv[:, layer].repeat_interleave(group, 2).float().unbind(1)
    offsets, tokens = view.readers.tolist(), view.tokens.tolist()
    view.outputs.fill_(torch.nan)
    for first_page, end_page, first_reader, end_reader, first_output in view.parts.tolist():
        slots = [(view.pages[i], slot) for i in range(first_page, end_page) for slot in range(tokens[i])]
        k, v = (torch.stack([of[page, :, slot] for page, slot in slots], 1) for of in (keys, values))
        for i in range(end_reader - first_reader):
            scores = torch.einsum("hd,htd->ht", query[offsets[first_reader + i]].float() * scaling, k)
            view.outputs[first_output + i] = torch.einsum("ht,htd->hd", scores.softmax(-1), v)
            view.log_sums[first_output + i] = scores.logsumexp(-1)
    starts = view.starts.tolist()
    for i, offset in enumerate(view.offsets.tolist()):
        own = view.readings[starts[i] : starts[i + 1]].long()
        shares = view.log_sums[own].softmax(0)[..., None]
        output[offset] = (shares * view.outputs[own]).sum(0).to(output.dtype)


def of_other_numbers(view, query, kv, layer, scaling, output):
    attend_parts_plainly(view, query, kv, layer - 1, scaling, output)
