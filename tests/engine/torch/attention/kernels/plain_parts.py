"""attend_parts, of a PartsView, and store_kv without a kernel: part by part and row by row."""

import torch


def attend_parts_plainly(view, query, kv, layer, scores, output):
    group = query.shape[1] // kv.shape.num_kv_heads
    keys, values = (of.repeat_interleave(group, 1).float() for of in kv.layer(layer))
    offsets, pages, page_size = view.readers.tolist(), view.pages.long(), keys.shape[2]
    view.outputs.fill_(torch.nan)
    for part in launched(view):
        first_page, end_page, first_reader, end_reader, first_output, first_slot, end_slot = part
        slots = torch.arange(first_slot, (end_page - first_page - 1) * page_size + end_slot)
        k, v = (
            of[pages[first_page + slots // page_size], :, slots % page_size].transpose(0, 1)
            for of in (keys, values)
        )
        for i in range(end_reader - first_reader):
            own = torch.einsum("hd,htd->ht", query[offsets[first_reader + i]].float() * scores.scaling, k)
            if scores.softcap is not None:
                own = scores.softcap * torch.tanh(own / scores.softcap)
            view.outputs[first_output + i] = torch.einsum("ht,htd->hd", own.softmax(-1), v)
            view.log_sums[first_output + i] = own.logsumexp(-1)
    for own, offset in zip(readings_of(view), view.offsets.tolist(), strict=True):
        log_sums = view.log_sums[own]
        if scores.sinks is not None:
            log_sums = torch.cat([log_sums, scores.sinks.float()[None]])
        shares = log_sums.softmax(0)[: len(own), :, None]
        output[offset] = (shares * view.outputs[own]).sum(0).to(output.dtype)


def launched(view):
    """Return the parts that have a program."""
    num_narrow, num_parts = view.counts.tolist()
    parts = view.parts.tolist()
    return parts[: min(num_narrow, view.grid[0])] + parts[num_narrow:num_parts][: view.grid[1]]


def readings_of(view):
    """Return for each query which outputs it joins."""
    bounds = zip(view.starts.tolist(), view.ends.tolist(), strict=True)
    return [view.readings[start:end].long() for start, end in bounds]


def of_other_numbers(view, query, kv, layer, scores, output):
    attend_parts_plainly(view, query, kv, layer - 1, scores, output)


def store_kv_plainly(keys, values, kv, layer, rows, pages, slots):
    for row, page, slot in zip(rows.tolist(), pages.tolist(), slots.tolist(), strict=True):
        if page >= 0:
            for pool, numbers in zip(kv.layer(layer), (keys, values), strict=True):
                pool[page, :, slot] = numbers[row]
