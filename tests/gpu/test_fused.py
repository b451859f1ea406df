"""Fused operations on the device: what Triton's kernels give is what definitions do, also in a graph."""

import pytest
import torch

from engine.torch.model.fused.fused_models import COUNTS, counts_of, loaded, logits_of, off_by
from services.engine.torch.model.fused import plain_kernels
from services.engine.torch.model.fused.fuse import fuse
from services.engine.torch.model.fused.known_operations import MOST_UNLIKE, unlike
from services.engine.torch.model.fused.plain_kernels import NormForm, RotaryForm
from services.engine.torch.model.model_probe import probe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, KV_HEADS, DIM = 20, 10, 128
# cuBLAS may add up a wider product in another order.
OFF_BY = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@pytest.fixture(scope="module")
def kernels():
    from services.engine.torch.model.fused.fused_kernel import KERNELS

    return KERNELS


def cases(kernels, device, dtype, total):
    """Yield what a kernel and its stand-in compute of the same numbers, as they come of a product."""
    generator = torch.Generator().manual_seed(total)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    hidden, weight, of_heads = random(1, total, 2560), random(2560), random(DIM)
    product = random(1, total, (HEADS + 2 * KV_HEADS) * DIM)
    query = product[..., : HEADS * DIM].view(1, total, HEADS, DIM)
    key = product[..., HEADS * DIM : (HEADS + KV_HEADS) * DIM].view(1, total, KV_HEADS, DIM)
    for form in (NormForm(1e-6, False, True), NormForm(1e-6, False, False), NormForm(1e-6, True, False)):
        yield tuple(each.normalize(hidden, weight, form) for each in (kernels, plain_kernels.PLAIN))
        added = [torch.empty_like(hidden) for _ in range(2)]
        yield tuple(
            each.add_and_normalize(hidden, hidden.flip(2), total_of, weight, form)
            for each, total_of in zip((kernels, plain_kernels.PLAIN), added, strict=True)
        )
        yield tuple(added)
        for heads in (query, key.transpose(1, 2)):
            yield tuple(each.normalize(heads, of_heads, form) for each in (kernels, plain_kernels.PLAIN))
    for angles, form in [(DIM, RotaryForm(DIM // 2, True)), (DIM // 4, RotaryForm(DIM // 8, True))]:
        cos, sin = random(1, total, angles), random(1, total, angles)
        states = query.transpose(1, 2), key.transpose(1, 2)
        rotated = [each.rotate(*states, cos, sin, form) for each in (kernels, plain_kernels.PLAIN)]
        yield from zip(*rotated, strict=True)
    gate, up = random(1, total, 2 * 6912).split(6912, -1)
    for activation in ("silu", "gelu_tanh"):
        yield tuple(each.activate(gate, up, activation) for each in (kernels, plain_kernels.PLAIN))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("total", [1, 5, 64])
def test_kernels_round_as_torchs_operations(kernels, device, dtype, total):
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts off where it should round")
    assert [
        i
        for i, (given, expected) in enumerate(cases(kernels, device, dtype, total))
        if unlike(given, expected) > MOST_UNLIKE
    ] == []


@pytest.mark.parametrize("family", COUNTS)
def test_every_family_is_fused_and_right(kernels, device, family, subtests):
    # The interpreter, which is for a rehearsal, cuts bfloat16 off where it should round.
    for dtype in ("float32", "float16" if device == "cpu" else "bfloat16"):
        with subtests.test(dtype=dtype):
            model = loaded(family, dtype, device)
            defined = logits_of(model)
            fused = fuse(model, probe(model).read_linears, kernels)
            assert counts_of(fused) == COUNTS[family]
            assert off_by(logits_of(model), defined) <= OFF_BY[model.dtype]


def test_a_graph_replays_what_is_fused(kernels, device):
    """Nothing of a captured step but its static input is read again."""
    if device == "cpu":
        pytest.skip("a CPU has no graphs")
    model = loaded("qwen3", "bfloat16", device)
    fuse(model, probe(model).read_linears, kernels)
    layer = model.model.layers[0]
    rows = torch.zeros(1, 4, model.config.hidden_size, dtype=model.dtype, device=device)

    def compute():
        normed = layer.input_layernorm(rows)
        attention = layer.self_attn
        query = attention.q_norm(attention.q_proj(normed).view(1, 4, -1, attention.head_dim))
        return query, attention.k_proj(normed), attention.v_proj(normed), layer.mlp(normed)

    with torch.inference_mode():
        for _ in range(2):
            compute()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = compute()
        rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)))
        graph.replay()
        for given, expected in zip(captured, compute(), strict=True):
            assert torch.equal(given, expected)
