"""Recurrences in place compute what the definitions' own functions do."""

import itertools
import logging

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.falcon_h1 import modeling_falcon_h1 as falcon_h1
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from engine.torch.sequences import Carried, PageTables, Sequence, generate
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.engine.torch.checkpoint import load_model, open_checkpoint
from services.engine.torch.model import recurrence
from services.engine.torch.model.kv_groups import State
from services.engine.torch.model.packed_model import PackedModel
from services.engine.torch.model.recurrence import (
    Workers,
    _Convolution,
    _DeltaRule,
    _Mamba2,
    forward_in_place,
)
from services.engine.torch.model.step_cache import RecurrentStates, TokenRuns
from services.engine.torch.pools import SlotPool
from services.engine.torch.runner import TorchRunner
from services.kv.tails import PoolSizes

IN_PLACE = ["qwen3_5", "falcon_h1"]
MORE_IN_PLACE = ["qwen3_5_moe", "qwen3_next", "nemotron_h", "bamba"]
M, HEADS = 3, 4


@pytest.fixture
def both_workers(monkeypatch):
    """Those of one thread, and those of two."""
    monkeypatch.setattr(recurrence, "_SHARE_NUMBERS", 100)
    both = [Workers(1), Workers(2)]
    yield both
    for workers in both:
        workers.close()


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def slots_of(*shape):
    """A pool of five states, and three that are in place in it."""
    state = State((0, "recurrent", 0), shape, torch.float32)
    pool = SlotPool([state], num_slots=5, device=torch.device("cpu"))
    pool.of_state[state.name][:] = random(5, *shape)
    states = pool.of_state[state.name]
    return states, RecurrentStates(states, single_runs([4, 0, 3]), [])


def single_runs(slots):
    ones = np.ones(len(slots), np.int64)
    return TokenRuns(torch.tensor(slots), np.arange(len(slots)), ones, ones == 0)


def test_in_place_is_what_the_definition_computes(subtests, both_workers):
    for by_channel, normalised, dtype, workers in itertools.product(
        [False, True], [True, False], [torch.float32, torch.bfloat16], both_workers
    ):
        with subtests.test(
            "the delta rule is that of the definition",
            by_channel=by_channel,
            normalised=normalised,
            dtype=dtype,
        ):
            own = qwen3_5.torch_recurrent_gated_delta_rule
            if by_channel:  # Kimi's decay: not taken, and so computed on copies

                def own(query, key, value, *, g, **rest):
                    return qwen3_5.torch_recurrent_gated_delta_rule(query, key, value, g=g[..., 0], **rest)

            query, key = (random(M, 1, HEADS, size, dtype=dtype)[..., :16] for size in (16, 17))
            value, beta = random(M, 1, HEADS, 24, dtype=dtype), random(M, 1, HEADS).sigmoid()
            g = -random(M, 1, HEADS, 16).abs() if by_channel else -random(M, 1, HEADS).abs()
            states, in_place = slots_of(HEADS, 16, 24)
            options = dict(g=g, beta=beta, use_qk_l2norm_in_kernel=normalised, output_final_state=True)
            expected, last = own(query, key, value, initial_state=states[[4, 0, 3]], **options)
            before = states.clone()
            got, same = _DeltaRule(own, workers)(query, key, value, initial_state=in_place, **options)
            assert same is in_place
            assert (got.shape, got.dtype) == (expected.shape, dtype)
            torch.testing.assert_close(
                got, expected, atol=1e-4, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4
            )
            torch.testing.assert_close(states[[4, 0, 3]], last, atol=1e-5, rtol=1e-4)
            assert torch.equal(states[[1, 2]], before[[1, 2]])
    # Where a head has a decay and a time step; else copies are computed.
    for of_heads, with_rest, workers in itertools.product([True, False], [True, False], both_workers):
        with subtests.test("mamba2 is that of the definition", of_heads=of_heads, with_rest=with_rest):
            head_dim, d_state, groups = 8, 16, 2
            hidden, z = random(M, HEADS, head_dim), random(M, HEADS, head_dim + 1)[..., :head_dim]
            dt, dt_bias = random(M, HEADS, 1).expand(-1, -1, head_dim), random(HEADS, 1).expand(-1, head_dim)
            a = -random(HEADS).abs()[:, None, None].expand(-1, head_dim, d_state)
            if not of_heads:
                a = a.contiguous()
            b, c = random(M, groups, d_state), random(M, groups, d_state + 1)[..., :d_state]
            rest = dict(D=random(HEADS, 1).expand(-1, head_dim), z=z, dt_bias=dt_bias, dt_softplus=True)
            rest = rest if with_rest else {}
            own, (states, in_place) = (
                falcon_h1.mamba2_selective_state_update,
                slots_of(HEADS, head_dim, d_state),
            )
            copied = states[[4, 0, 3]].clone()
            expected = own(copied, hidden, dt, a, b, c, **rest)
            before = states.clone()
            got = _Mamba2(own, workers)(in_place, hidden, dt, a, b, c, **rest)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(states[[4, 0, 3]], copied, atol=1e-5, rtol=1e-4)
            assert torch.equal(states[[1, 2]], before[[1, 2]])
    with subtests.test("a convolution gives a token the same bits beside others"):
        weight, bias, hidden, states = random(20, 4), random(20), random(40, 20, 1), random(40, 20, 3)
        convolve = _Convolution(qwen3_5.causal_conv1d_update, None)
        together = convolve(hidden, states.clone(), weight, bias, "silu")
        alone = [convolve(hidden[[i]], states[[i]], weight, bias, activation="silu") for i in range(40)]
        assert torch.equal(together, torch.cat(alone))
        own = qwen3_5.causal_conv1d_update(hidden, states.clone(), weight, bias, "silu")
        torch.testing.assert_close(together, own)


def packed(architecture):
    model = load_model(open_checkpoint(tiny_checkpoint(architecture)), torch.device("cpu"))
    return PackedModel(model)


def output_of(family, in_place=True):
    sizes = PoolSizes(max_running_requests=4)
    runner = TorchRunner(tiny_checkpoint(family), num_pages=64, page_size=16, sizes=sizes)
    assert runner._model.in_place == in_place
    tables, prompts = PageTables(runner), [random_prompt(n, seed=n) for n in (5, 40, 1)]
    sequences = [Sequence(p, tables.take(60), 19, carried=Carried(tables)) for p in prompts]
    generate(runner, sequences, 8)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        count_near_ties(reference_generation(tiny_checkpoint(family), prompt, 8), sequence.output_ids)
    runner.close()


def test_the_families_compute_in_place_and_what_is_not_known_does_not(subtests):
    for family in IN_PLACE:
        with subtests.test("the families compute in place", family=family):
            output_of(family)
    with subtests.test("what is not known is left to the definition"):
        assert forward_in_place(nn.Linear(2, 2), Workers(1)) is None
        assert not packed("llama").in_place


@pytest.mark.exact
@pytest.mark.parametrize("family", MORE_IN_PLACE)
def test_more_families_compute_in_place(family):
    output_of(family)


@pytest.mark.exact
def test_a_kernel_that_is_wrong_is_done_without(subtests, caplog):
    for family in ["qwen3_5", "falcon_h1"]:
        with subtests.test(family=family), pytest.MonkeyPatch.context() as monkeypatch:
            caplog.clear()
            for name in ("delta_rule", "mamba2"):
                own = getattr(recurrence, name)
                monkeypatch.setattr(
                    recurrence, name, lambda *args, own=own, **options: own(*args, **options) * 1.1
                )
            with caplog.at_level(logging.WARNING):
                output_of(family, in_place=False)
            assert "recurrence_kernel_unusable" in caplog.text
