import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, MiniMaxConfig

from bench.families import FAMILIES
from exactness.checkpoints import tiny_checkpoint
from services.engine.torch.attention import step_view
from services.engine.torch.attention.paged_attention import IMPLEMENTATION
from services.engine.torch.checkpoint import load_model, open_checkpoint
from services.engine.torch.model import mixers, self_check
from services.engine.torch.model.packed_model import PackedModel
from services.engine.torch.model.self_check import check
from services.engine.torch.pools import SlotPool
from services.engine.torch.runner import TorchRunner
from services.values.errors import ConfigError, Unavailable

CPU = torch.device("cpu")


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, logger=self_check.__name__)
    return caplog


def packed(architecture, dtype=None):
    return PackedModel(load_model(open_checkpoint(tiny_checkpoint(architecture), dtype), CPU))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "gemma3" else pytest.mark.exact)
        for name in FAMILIES
        if name != "jamba"
    ],
)
def test_what_is_right_passes_and_would_have_been_seen(family, logged):
    check(packed(family), 16, family)
    assert "self_check_passed" in logged.text
    assert "self_check_blind" not in logged.text


@pytest.mark.exact
def test_pages_of_any_size_do(subtests, logged):
    for page_size in [1, 256]:
        with subtests.test(page_size=page_size):
            check(packed("qwen3_5"), page_size, "model")
            assert "self_check_blind" not in logged.text


@pytest.mark.exact
def test_what_is_no_fault_of_the_model_refuses_it_not_for_good(subtests, logged):
    with (
        subtests.test("a tie that one draw meets refuses nothing"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        logged.clear()
        draw = self_check._Check.run
        faults = iter(["a tie", ""])

        def run(drawn):
            findings = draw(drawn)
            findings.fault = next(faults)
            return findings

        monkeypatch.setattr(self_check._Check, "run", run)
        check(packed("qwen3_moe"), 16, "model")
        assert next(faults, None) is None
    with subtests.test("a clamp that chunks have alone passes"):
        # Nemotron-H's dt: its definition has two formulas.
        logged.clear()
        model = packed("nemotron_h")
        with torch.no_grad():
            for name, parameter in model.model.named_parameters():
                if "dt_bias" in name:
                    parameter.sub_(2.5)
        check(model, 16, "model")
        assert "self_check_passed" in logged.text
        assert model.in_place  # and not because nothing was computed so
    with (
        subtests.test("memory that is short may be there another time"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):

        def fail(*_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        model = packed("llama")
        monkeypatch.setattr(PackedModel, "compute", fail)
        with pytest.raises(Unavailable, match="fails its check at start"):
            check(model, 16, "model")


@pytest.mark.exact
def test_what_cannot_be_told_or_does_not_run_is_refused(subtests):
    with (
        subtests.test("jambas scan which forgets its state is refused by how much"),
        pytest.raises(ConfigError, match=r"cannot be served: .* another model: .* off by \d\.\de.* 1e-04"),
    ):
        TorchRunner(tiny_checkpoint("jamba"), num_pages=8, page_size=16)
    with subtests.test("a definition with a cache of its own is refused with what it lacks"):
        layers = ["linear_attention", "full_attention"]
        config = MiniMaxConfig(
            hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2
        )
        config.update({"num_hidden_layers": 2, "layer_types": layers, "vocab_size": 64, "head_dim": 16})
        model = AutoModelForCausalLM.from_config(config).eval()
        with pytest.raises(ConfigError, match=r"MiniMaxForCausalLM does not run here: .*get_linear_cache"):
            PackedModel(model)


@pytest.mark.exact
def test_a_state_that_hardly_counts_is_no_excuse_for_forgetting_it(monkeypatch):
    """Weights as transformers makes them hide it: off by 8e-5, where a lost state is by 2e-4."""
    torch.manual_seed(0)
    config = open_checkpoint(tiny_checkpoint("jamba")).config
    model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION).eval()
    with pytest.raises(ConfigError, match=r"without the state: .* cannot be told|another model"):
        check(PackedModel(model), 16, "model")
    monkeypatch.setattr(self_check, "free_bytes", lambda device: 0)
    with pytest.raises(ConfigError, match="another model"):  # in half precision alone, too
        check(packed("jamba", "bfloat16"), 16, "model")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.exact)])
def test_half_precision_is_checked_in_float32_too_and_left_as_it_was(dtype, logged):
    model = packed("qwen3_5", dtype)
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    check(model, 16, "model")
    assert "dtype=float32" in logged.text
    assert "dtype=half" in logged.text
    after = model.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert {tensor.dtype for tensor in after.values()} == {getattr(torch, dtype)}


def test_without_the_memory_half_precision_alone_is_checked(logged, monkeypatch):
    monkeypatch.setattr(self_check, "free_bytes", lambda device: 0)
    check(packed("qwen3_5", "bfloat16"), 16, "model")
    assert "dtype=float32" not in logged.text
    assert "dtype=half" in logged.text


def lose_states(monkeypatch):
    monkeypatch.setattr(mixers, "_scatter", lambda *_: None)


def never_zero(monkeypatch):
    monkeypatch.setattr(SlotPool, "zero", lambda *_: None)


def never_copy(monkeypatch):
    monkeypatch.setattr(SlotPool, "copy", lambda *_: None)


def mix_up_the_singles(monkeypatch):
    scatter = mixers._scatter

    def reversed_scatter(pool, slots, states):
        scatter(pool, slots.flip(0), states)

    monkeypatch.setattr(mixers, "_scatter", reversed_scatter)


FAULTS = [
    ("qwen3_5", lose_states),
    ("falcon_h1", never_zero),
    ("qwen3_5", never_copy),
    ("falcon_h1", mix_up_the_singles),
]
MORE_FAULTS = [
    ("falcon_h1", lose_states),
    ("qwen3_5", never_zero),
    ("falcon_h1", never_copy),
    ("qwen3_5", mix_up_the_singles),
]


def test_states_that_go_astray_are_found(subtests):
    for family, fault in FAULTS:
        with subtests.test(family, fault=fault):
            find_astray_states(family, fault)


@pytest.mark.exact
@pytest.mark.parametrize(("family", "fault"), MORE_FAULTS)
def test_more_states_that_go_astray_are_found(family, fault):
    find_astray_states(family, fault)


def find_astray_states(family, fault):
    with pytest.MonkeyPatch.context() as monkeypatch:
        fault(monkeypatch)
        monkeypatch.setattr(self_check, "_DRAWS", 1)
        with pytest.raises(ConfigError, match="another model"):
            check(packed(family), 16, family)


def test_a_window_that_is_off_by_a_token_is_found(subtests):
    for family, off_by in [("gpt_oss", -1), ("gemma3", 1), ("llama4", -1)]:
        with subtests.test(family, off_by=off_by), pytest.MonkeyPatch.context() as monkeypatch:
            find_a_shifted_window(family, off_by, monkeypatch)


@pytest.mark.exact
@pytest.mark.parametrize(
    ("family", "off_by"), [("gpt_oss", 1), ("gemma3", -1), ("gemma4", -1), ("gemma4", 1), ("llama4", 1)]
)
def test_more_windows_that_are_off_by_a_token_are_found(family, off_by, monkeypatch):
    find_a_shifted_window(family, off_by, monkeypatch)


def find_a_shifted_window(family, off_by, monkeypatch):
    first_seen = step_view.Reach.first_seen

    def shifted(reach, position):
        seen = first_seen(reach, position)
        return seen + off_by if reach.window else seen

    monkeypatch.setattr(step_view.Reach, "first_seen", shifted)
    monkeypatch.setattr(self_check, "_DRAWS", 1)
    with pytest.raises(ConfigError, match="another model"):
        check(packed(family), 16, family)


def test_the_log_says_what_the_check_did_not_see(subtests, logged):
    with subtests.test("a check that would see nothing says so"):
        logged.clear()
        model = packed("falcon_h1")
        with torch.no_grad():
            for layer in model.model.model.layers:
                layer.mamba.out_proj.weight.zero_()
        check(model, 16, "numb")
        assert "self_check_blind model=numb dtype=float32 lost=['state']" in logged.text
    with (
        subtests.test("a window that the check does not reach is told"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        logged.clear()
        directory = tiny_checkpoint("gemma3", window=250)
        model = PackedModel(load_model(open_checkpoint(directory), CPU))
        check(model, 16, "model")
        assert "self_check_short" not in logged.text
        monkeypatch.setattr(self_check, "_MOST_TOKENS", 20)
        check(model, 16, "model")
        assert "self_check_short window=250 tokens=185" in logged.text
