"""attend_parts, of a PartsView, without a kernel: part by part and row by row."""

import torch


def attend_parts_plainly(view, query, kv, layer, scores, output):
    group = query.shape[1] // kv.shape.num_kv_heads
    keys, values = (of.repeat_interleave(group, 1).float() for of in kv.layer(layer))
    offsets, firsts, ends = view.readers.tolist(), view.firsts.tolist(), view.ends.tolist()
    view.outputs.fill_(torch.nan)
    for first_page, end_page, first_reader, end_reader, first_output in view.parts.tolist():
        slots = [
            (view.pages[i], slot) for i in range(first_page, end_page) for slot in range(firsts[i], ends[i])
        ]
        k, v = (torch.stack([of[page, :, slot] for page, slot in slots], 1) for of in (keys, values))
        for i in range(end_reader - first_reader):
            own = torch.einsum("hd,htd->ht", query[offsets[first_reader + i]].float() * scores.scaling, k)
            if scores.softcap is not None:
                own = scores.softcap * torch.tanh(own / scores.softcap)
            view.outputs[first_output + i] = torch.einsum("ht,htd->hd", own.softmax(-1), v)
            view.log_sums[first_output + i] = own.logsumexp(-1)
    starts = view.starts.tolist()
    for i, offset in enumerate(view.offsets.tolist()):
        own = view.readings[starts[i] : starts[i + 1]].long()
        log_sums = view.log_sums[own]
        if scores.sinks is not None:
            log_sums = torch.cat([log_sums, scores.sinks.float()[None]])
        shares = log_sums.softmax(0)[: len(own), :, None]
        output[offset] = (shares * view.outputs[own]).sum(0).to(output.dtype)


def of_other_numbers(view, query, kv, layer, scores, output):
    attend_parts_plainly(view, query, kv, layer - 1, scores, output)
