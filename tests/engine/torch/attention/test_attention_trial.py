"""Kernels are compared with plain attention, and wrong ones are found out."""

import itertools
from dataclasses import replace

import pytest
import torch

from engine.torch.attention.kernels.plain_parts import (
    attend_parts_plainly,
    of_other_numbers,
    readings_of,
    store_kv_plainly,
)
from engine.torch.attention.paging import empty
from services.engine.torch.attention import paged_attention as attention
from services.engine.torch.attention import step_view
from services.engine.torch.attention.attention_trial import (
    KernelWrong,
    require_agreement,
    require_causal,
    require_stored,
)
from services.engine.torch.attention.page_pieces import OnDevice
from services.engine.torch.attention.paged_attention import _weights
from services.engine.torch.attention.paged_kv import PageShape
from services.engine.torch.attention.step_view import seen_by
from services.values.errors import ConfigError

NUM_HEADS = 4


def pool(dtype=torch.float32, page_size=16):
    return empty(PageShape(3, 2, page_size, 8, 8), num_pages=2, dtype=dtype)


DTYPES, PAGE_SIZES = (torch.float32, torch.bfloat16, torch.float16), (1, 7, 16, 64)


def check_right(dtype, page_size):
    kv = pool(dtype, page_size)
    require_agreement(OnDevice(attend_parts_plainly, NUM_HEADS, num_programs=16), kv)
    require_causal(kv, NUM_HEADS)
    require_stored(store_kv_plainly, kv)
    assert not kv.numbers.any()


@pytest.mark.exact
def test_what_is_right_agrees_in_every_type_and_page_size(subtests):
    for dtype, page_size in itertools.product(DTYPES, PAGE_SIZES):
        with subtests.test(dtype=dtype, page_size=page_size):
            check_right(dtype, page_size)


def forgetting(column, change):
    """A kernel for which every part is another one in one respect."""

    def attend(view, *arguments):
        view.parts[:, column] += change
        attend_parts_plainly(view, *arguments)

    return attend


def of_all_slots(view, *arguments):
    """A kernel that reads the pages that end early and the windows' first ones whole."""
    view.parts[:, 5] = 0
    view.parts[:, 6] = 16
    attend_parts_plainly(view, *arguments)


def beyond_the_counts(view, *arguments):
    view.counts[1] = len(view.parts)
    attend_parts_plainly(view, *arguments)


def in_the_order_of_readings(view, *arguments):
    """A kernel for which each query's readings end where the next one's start."""
    view.ends[:-1] = view.starts[1:]
    attend_parts_plainly(view, *arguments)


def without_shared_pages(view, query, kv, layer, scores, output):
    view.log_sums.fill_(0)
    attend_parts_plainly(view, query, kv, layer, scores, output)
    for i, offset in enumerate(view.offsets.tolist()):
        output[offset] = view.outputs[view.readings[view.starts[i]].long()]


def nowhere(view, query, kv, layer, scores, output):
    output.fill_(torch.nan)


def without(**settings):
    """A kernel that knows nothing of a layer's sinks or soft cap."""

    def attend(view, query, kv, layer, scores, output):
        attend_parts_plainly(view, query, kv, layer, replace(scores, **settings), output)

    return attend


def of_whole_windows(view, *arguments):
    view.parts[:, 5] = 0
    attend_parts_plainly(view, *arguments)


def with_a_sink_in_every_part(view, query, kv, layer, scores, output):
    attend_parts_plainly(view, query, kv, layer, scores, output)
    if scores.sinks is None:
        return
    for own, offset in zip(readings_of(view), view.offsets.tolist(), strict=True):
        log_sums, sinks = view.log_sums[own], scores.sinks.float()[None]
        total = torch.cat([log_sums, sinks.expand(len(own), -1)]).logsumexp(0)
        output[offset] = ((log_sums - total).exp()[..., None] * view.outputs[own]).sum(0)


@pytest.mark.exact
def test_a_kernel_that_is_wrong_is_found_out(subtests):
    for attend in [
        forgetting(2, 1),
        of_other_numbers,
        of_all_slots,
        beyond_the_counts,
        in_the_order_of_readings,
        without_shared_pages,
        nowhere,
        without(sinks=None),
        without(softcap=None),
        of_whole_windows,
        with_a_sink_in_every_part,
    ]:
        with subtests.test(attend=attend), pytest.raises((KernelWrong, IndexError)):
            require_agreement(OnDevice(attend, NUM_HEADS, num_programs=16), pool())


def store_in(change):
    """A kernel that takes one of its arguments for another."""

    def store(keys, values, kv, layer, rows, pages, slots):
        store_kv_plainly(*change(keys, values, kv, layer, rows, pages, slots))

    return store


def test_a_kernel_that_stores_otherwise_is_found_out(subtests):
    for name, change in {
        "in another layer": lambda k, v, kv, layer, *places: (k, v, kv, layer - 1, *places),
        "one page on": lambda k, v, kv, layer, r, p, s: (k, v, kv, layer, r, (p + 1) % 12, s),
        "in another slot": lambda k, v, kv, layer, r, p, s: (k, v, kv, layer, r, p, s * 0),
        "other rows": lambda k, v, kv, layer, r, p, s: (k, v, kv, layer, r * 0, p, s),
        "other heads": lambda k, v, *others: (k.flip(1), v, *others),
        "keys for values": lambda k, v, *others: (k, k, *others),
        "what is not to be stored": lambda k, v, kv, layer, r, p, s: (k, v, kv, layer, r, p.abs(), s),
        "not the last of them": lambda *args: (*args[:4], *(ids[:-2] for ids in args[4:])),
    }.items():
        with subtests.test(name), pytest.raises(KernelWrong):
            require_stored(store_in(change), pool())


def masked(diagonal):
    """The first token of a chunk which begins at `start` sees keys up to `diagonal(start)`."""

    def mask(length, end, device):
        return torch.ones(length, end, dtype=torch.bool).tril(diagonal(end - length))

    return step_view, "_causal_mask", mask


def attending(change):
    attend = attention.scaled_dot_product_attention
    return (
        attention,
        "scaled_dot_product_attention",
        lambda *args, **settings: change(attend, *args, **settings),
    )


def without_sinks(products, seen, scores):
    return _weights(products, seen, replace(scores, sinks=None))


def test_a_torch_that_attends_otherwise_is_refused(subtests):
    for fault in [
        masked(lambda start: start + 1),  # one token too many
        masked(lambda start: start - 1),
        masked(lambda start: 0),  # the other corner
        attending(lambda attend, *args, **settings: attend(*args, **settings | {"is_causal": False})),
        attending(lambda attend, q, k, v, **settings: attend(q, k.flip(0), v, **settings)),  # the wrong heads
        attending(lambda attend, *args, **settings: attend(*args, **settings) * torch.nan),
        (attention, "_weights", without_sinks),
    ]:
        with (
            subtests.test("a torch that attends wrongly is refused", fault=fault),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            monkeypatch.setattr(*fault)
            with pytest.raises(ConfigError, match="plain softmax"):
                require_causal(pool(), NUM_HEADS)
    # With torch's own attention, and where scores are made one by one.
    for module in [step_view, attention]:
        with (
            subtests.test("so is a window of one token too many", module=module),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):

            def also_before(positions, reach, first, end):
                return seen_by(positions, replace(reach, window=reach.window + 1), first, end)

            monkeypatch.setattr(module, "seen_by", also_before)
            with pytest.raises(ConfigError, match="plain softmax"):
                require_causal(pool(), NUM_HEADS)
    with subtests.test("so is one that cannot"), pytest.MonkeyPatch.context() as monkeypatch:

        def fail(*args, **settings):
            raise RuntimeError("no kernel image is available")

        monkeypatch.setattr(attention, "scaled_dot_product_attention", fail)
        with pytest.raises(ConfigError, match="cannot attend on cpu: no kernel image"):
            require_causal(pool(), NUM_HEADS)
