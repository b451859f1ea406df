"""Every family is fused with torch's own operations for kernels, and computes what it is defined to."""

import logging
from collections import Counter
from functools import partial, wraps
from weakref import ref

import pytest
import torch
from torch import nn

from bench.families import FAMILIES
from engine.torch.model.fused.fused_models import COUNTS, OFF_BY, counts_of, loaded, logits_of, off_by
from services.engine.torch.model import packed_model, self_check
from services.engine.torch.model.fused import products
from services.engine.torch.model.fused.fuse import fuse
from services.engine.torch.model.fused.plain_kernels import PLAIN
from services.engine.torch.model.fused.products import Fused, Product, ProductPart, shared_inputs
from services.engine.torch.model.model_probe import probe
from services.engine.torch.model.packed_model import PackedModel
from services.values.errors import Unavailable

QUICK = ("llama", "qwen3", "gemma3")


def assert_fused_right(family, dtype):
    model = loaded(family, dtype)
    defined = logits_of(model)
    fused = fuse(model, probe(model).read_linears)
    assert counts_of(fused) == COUNTS[family]
    assert off_by(logits_of(model), defined) <= OFF_BY[model.dtype]
    with fused.as_defined():
        assert torch.equal(logits_of(model), defined)
    assert fused
    fused.undo()
    assert not fused
    assert torch.equal(logits_of(model), defined)


def test_what_is_fused_computes_what_is_defined(subtests):
    for family in QUICK:
        for dtype in ("float32", "bfloat16"):
            with subtests.test(family, dtype=dtype):
                assert_fused_right(family, dtype)


@pytest.mark.exact
@pytest.mark.parametrize("family", sorted({*COUNTS, *FAMILIES} - set(QUICK)))
def test_what_is_fused_of_other_families_does_too(family, subtests):
    for dtype in ("float32", "bfloat16", "float16"):
        with subtests.test(dtype=dtype):
            assert_fused_right(family, dtype)


def test_weights_are_kept_once_and_follow_the_merged_one():
    model = loaded("qwen2")  # its q, k and v have biases
    own = {name: each.clone() for name, each in model.named_parameters()}
    fuse(model)
    memory = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()
    }
    assert sum(memory.values()) == sum(each.numel() * each.itemsize for each in own.values())
    parts = {name: each for name, each in model.named_modules() if isinstance(each, ProductPart)}
    assert Counter(name.rpartition(".")[2] for name in parts) == dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 2
    )
    for name, part in parts.items():
        assert torch.equal(part.weight, own[f"{name}.weight"])
        assert (part.bias is None) == (f"{name}.bias" not in own)
    for parameter in model.parameters():
        parameter.data = 2 * parameter.data
    for name, part in parts.items():
        assert torch.equal(part.weight, 2 * own[f"{name}.weight"])


@pytest.fixture
def layers():
    torch.manual_seed(1)
    return [nn.Linear(8, 16), nn.Linear(8, 5, bias=False), nn.Linear(8, 24)]


def test_a_product_is_right_whatever_is_called(layers, subtests):
    rows, others = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    expected = {id(x): [layer(x) for layer in layers] for x in (rows, others)}
    fused = Fused()
    product = Product(fused, layers)
    for what, calls in {
        "in order": [(0, rows), (1, rows), (2, rows)],
        "in another order": [(2, rows), (0, rows), (2, rows), (1, rows)],
        "not all": [(0, rows), (2, rows), (0, others), (1, others)],
        "two tensors by turns": [(0, rows), (1, others), (1, rows), (2, others), (2, rows)],
        "one twice": [(0, rows), (1, rows), (1, rows), (2, rows), (2, rows)],
        "other first": [(1, rows), (1, others), (0, others), (2, others)],
    }.items():
        with subtests.test(what):
            for index, x in calls:
                torch.testing.assert_close(layers[index](x), expected[id(x)][index])
    for layer in layers:
        layer(rows)
    assert product._given is product._columns is None  # nothing of a step outlives it
    with fused.as_defined():
        for layer, own in zip(layers, expected[id(rows)], strict=True):
            assert torch.equal(layer(rows), own)


def test_columns_that_something_else_computes_are_shared_though_fusing_is_undone(layers):
    fused, calls = Fused(), []
    product, rows = Product(fused, layers), torch.randn(1, 3, 8)
    columns = product(rows)

    def computes(given):
        calls.append(given)
        return columns

    product.compute_by(computes)
    fused.undo()
    given = torch.cat([layer(rows) for layer in layers], -1)
    assert len(calls) == 1
    assert torch.equal(given, torch.cat([columns[..., :21], columns[..., 24:48]], -1))


def test_what_was_changed_in_place_is_computed_anew(layers):
    Product(Fused(), layers)
    rows = torch.randn(1, 3, 8)
    layers[0](rows), layers[1](rows)
    rows.zero_()
    assert torch.equal(layers[1](rows), torch.zeros(1, 3, 5))
    layers[0](rows)
    assert torch.equal(layers[1](rows), torch.zeros(1, 3, 5))


def test_what_is_tied_or_read_by_others_is_left():
    model = loaded("llama")
    model.model.layers[0].self_attn.k_proj.weight = model.model.layers[1].self_attn.k_proj.weight
    kept = {model.model.layers[1].mlp.up_proj}
    name = {module: name.removeprefix("model.layers.") for name, module in model.named_modules()}
    assert [[name[each] for each in group] for group in shared_inputs(model, kept)] == [
        ["0.self_attn.q_proj", "0.self_attn.v_proj"],
        ["0.mlp.gate_proj", "0.mlp.up_proj"],
        ["1.self_attn.q_proj", "1.self_attn.v_proj"],
    ]


def test_who_gets_a_tensor_that_was_changed_in_place_is_left():
    model = loaded("llama")
    first = model.model.layers[0]

    def change(_module, given, _product):
        given[0].mul_(2)

    for layer in (first.self_attn.k_proj, first.mlp.gate_proj):
        layer.register_forward_hook(change)
    defined = logits_of(model)
    groups = shared_inputs(model)
    assert [len(group) for group in groups] == [2, 3, 2]
    assert groups[0] == [first.self_attn.q_proj, first.self_attn.k_proj]
    fuse(model)
    assert off_by(logits_of(model), defined) <= OFF_BY[torch.float32]


def of_trial(rows, dtype):
    return dtype if rows.shape[1] == 7 else rows.dtype


LIKE_NORMS = {
    "a mean is taken off": lambda norm, rows: norm(rows - rows.mean(-1, keepdim=True)),
    "its epsilon is another": lambda norm, rows: norm(rows + 1e-3 * rows.sign()),
    "it gives another type": lambda norm, rows: norm(rows).to(of_trial(rows, torch.half)),
    "it raises": lambda norm, rows: norm(rows).to(of_trial(rows, "nothing")),
}


def test_a_module_that_only_looks_like_a_norm_is_left(subtests):
    for what, like in LIKE_NORMS.items():
        with subtests.test(what):
            model = loaded("llama")
            norm = model.model.norm
            norm.forward = partial(like, norm.forward)
            own, weight = norm.forward, norm.weight.clone()
            assert fuse(model).num_norms == COUNTS["llama"][1] - 1
            assert norm.forward is own
            assert torch.equal(norm.weight, weight)


def test_a_decorated_mlp_keeps_its_decorator(monkeypatch):
    model = loaded("llama")
    mlp = type(model.model.layers[0].mlp)
    own = mlp.forward
    monkeypatch.setattr(mlp, "forward", wraps(own)(lambda self, x: 2 * own(self, x)))
    defined = logits_of(model)
    assert fuse(model).num_activations == 0
    assert off_by(logits_of(model), defined) <= OFF_BY[torch.float32]


def test_an_activation_that_bounds_large_numbers_is_left():
    model = loaded("llama")
    mlp = model.model.layers[0].mlp
    own = mlp.act_fn
    for bounded, count in [
        (lambda x: own(x).clamp(max=5), 1),
        (lambda x: own(x.clamp(min=-9)), 1),
        (lambda x: own(x), 2),
    ]:
        mlp.act_fn = nn.Identity()
        mlp.act_fn.forward = bounded
        assert fuse(model).num_activations == count
        for layer in model.model.layers:
            vars(layer.mlp).pop("forward", None)


def test_gate_and_up_are_freed_before_down_is_computed():
    model, products = loaded("llama"), []

    def keep(_module, _given, product):
        products.append(ref(product))

    def look(_module, _given):
        assert [each() for each in products] == [None, None]
        products.clear()

    fuse(model)
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(keep)
        layer.mlp.up_proj.register_forward_hook(keep)
        layer.mlp.down_proj.register_forward_pre_hook(look)
    logits_of(model)
    assert products == []


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A model is left as it is but for what is fused."""
    monkeypatch.setattr(packed_model, "even_activations", lambda model: None)
    monkeypatch.setattr(packed_model, "fuse_norms", lambda model: None)


def packed(family, dtype="float32", kernels=PLAIN):
    model = PackedModel(loaded(family, dtype))
    model.fused = fuse(model.model, model.probed.read_linears, kernels)
    return model


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "gemma3" else pytest.mark.exact)
        for name in COUNTS
        if name != "jamba"
    ],
)
def test_packed_steps_pass_the_check_at_start(family, as_on_a_gpu, caplog):
    caplog.set_level(logging.INFO)
    model = packed(family)
    self_check.check(model, 16, family)
    assert model.fused
    assert "self_check_passed" in caplog.text and "unusable" not in caplog.text


def test_kernels_that_are_wrong_in_a_step_are_left_out(as_on_a_gpu, caplog):
    def wrong(rows, weight, form):
        return PLAIN.normalize(rows, weight, form) * (1 if rows.shape[1] < 8 else 1.01)

    model = packed("llama", kernels=PLAIN._replace(normalize=wrong))
    assert counts_of(model.fused) == COUNTS["llama"]
    self_check.check(model, 16, "model")
    assert not model.fused
    assert "fused_kernels_unusable" in caplog.text


def test_memory_that_is_short_for_a_product_may_be_there_another_time(monkeypatch):
    def stacked(parts):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(products, "_stacked", stacked)
    with pytest.raises(Unavailable, match=r"LlamaForCausalLM cannot be fused: .*out of memory"):
        fuse(loaded("llama"))


def test_a_kernel_that_does_not_compile_costs_what_it_would_fuse(caplog):
    def broken(*_):
        raise RuntimeError("no compiler")

    model = loaded("llama")
    assert counts_of(fuse(model, kernels=PLAIN._replace(rotate=broken))) == (4, 5, 0, 2)
    assert "fused_kernels_unusable" in caplog.text


def test_sums_whose_bits_differ_are_left_apart():
    def rounds_otherwise(first, second, total, weight, form):
        return PLAIN.normalize(first.double().add(second).to(first) * (1 + 1e-6), weight, form)

    assert fuse(loaded("llama")).adds
    fused = fuse(loaded("llama"), kernels=PLAIN._replace(add_and_normalize=rounds_otherwise))
    assert not fused.adds
    assert counts_of(fused) == COUNTS["llama"]
