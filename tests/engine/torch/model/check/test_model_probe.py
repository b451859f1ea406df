"""The probe reads the definitions of transformers, none of which it knows."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from exactness.checkpoints import tiny_checkpoint
from services.engine.torch.checkpoint import load_model, open_checkpoint
from services.engine.torch.model.kv_groups import attention_groups
from services.engine.torch.model.model_probe import probe
from services.values.errors import ConfigError, Unavailable
from services.values.kv import GroupKind, KvGroup

FULL, SLIDING, CHUNKED = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_WINDOW
CPU = torch.device("cpu")


def made(architecture, dtype=None, **settings):
    return load_model(open_checkpoint(tiny_checkpoint(architecture, **settings), dtype), CPU)


def groups(architecture, **settings):
    return attention_groups(probe(made(architecture, **settings)).calls)


def group(kind, layer_ids, heads=2, width=16, **settings):
    return KvGroup(kind, layer_ids, heads, width, "float32", **settings)


@pytest.mark.exact
def test_attention_of_more_families_is_grouped_by_what_it_keeps(subtests):
    for architecture, layers in [("minimax_m2", (0, 1)), ("qwen3_next", (1, 3)), ("nemotron_h", (2, 5))]:
        with subtests.test(architecture=architecture):
            assert groups(architecture) == (group(FULL, layers),)


def test_attention_is_grouped_by_what_it_keeps(subtests):
    for architecture, expected in [
        ("llama", [group(FULL, (0, 1))]),
        ("falcon_h1", [group(FULL, (0, 1))]),
        ("qwen3_5", [group(FULL, (1, 3))]),
        ("gpt_oss", [group(FULL, (1, 3)), group(SLIDING, (0, 2), window=24)]),
        ("gemma3", [group(FULL, (1, 3)), group(SLIDING, (0, 2), window=24)]),
        ("llama4", [group(FULL, (1, 3)), group(CHUNKED, (0, 2), window=24)]),
        # Two layers share what others keep; full ones have wider heads.
        ("gemma4", [group(FULL, (1, 3), width=32), group(SLIDING, (0, 2), window=24)]),
        ("deepseek_v3", [group(FULL, (0, 1), heads=1, width=32 + 8, v_head_dim=0)]),
    ]:
        with subtests.test(architecture=architecture):
            assert groups(architecture) == tuple(expected)


def test_windows(subtests):
    with subtests.test("without full attention windows are kept whole"):
        assert groups("mistral", window=24) == (group(FULL, (0, 1)),)
        calls = probe(made("mistral", window=24)).calls
        assert [(call.shape.kind, call.shape.window) for call in calls] == [(SLIDING, 24)] * 2
    for architecture, changes, expected in [
        ("qwen2", {"sliding_window": 24, "use_sliding_window": False}, [group(FULL, (0, 1))]),
        (
            "qwen3",
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 24,
                "use_sliding_window": True,
            },
            [group(FULL, (0,)), group(SLIDING, (1,), window=24)],
        ),
    ]:
        with subtests.test("a window counts where it is used", architecture=architecture):
            config = open_checkpoint(tiny_checkpoint(architecture)).config
            config.update(changes)
            model = AutoModelForCausalLM.from_config(config).eval()
            assert attention_groups(probe(model).calls) == tuple(expected)


def test_recurrent_states_are_float32_and_the_model_is_left_as_it_was(subtests):
    for dtype, (architecture, states) in itertools.product(
        ["float32", "bfloat16"],
        [
            # conv: queries and keys of 2 heads, values of 4, each 16 wide, of 4 tokens
            ("qwen3_5", {("conv", (128, 4)), ("recurrent", (4, 16, 16))}),
            ("falcon_h1", {("conv", (128 + 2 * 2 * 16, 4)), ("recurrent", (8, 16, 16))}),
        ],
    ):
        with subtests.test(
            "recurrent states are float32 whatever the model is",
            dtype=dtype,
            architecture=architecture,
            states=states,
        ):
            found = probe(made(architecture, dtype))
            assert {(state.name[1], state.shape) for state in found.states} == states
            dtypes = {state.name[1]: state.dtype for state in found.states}
            assert dtypes == {"conv": getattr(torch, dtype), "recurrent": torch.float32}
            assert len(found.mixers) == 2
            assert [len(mixer.states) for mixer in found.mixers] == [2, 2]
    with subtests.test("a model is left as it was"):
        model = made("qwen3_5")
        hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
        probe(model)
        assert model.config._attn_implementation == "isthmus_paged"
        assert hooks == sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
        )


def test_logits_are_of_the_type_that_the_head_gives():
    for architecture, dtype in [("llama", torch.bfloat16), ("nemotron_h", torch.float32)]:
        assert probe(made(architecture, "bfloat16")).logits_dtype is dtype


class Attention(torch.nn.Module):
    """Stands for a Llama's, and asks its cache for something."""

    def __init__(self, ask):
        super().__init__()
        self.ask = ask

    def forward(self, hidden_states, past_key_values=None, cache=None, **_):
        self.ask(cache or past_key_values, torch.zeros(1, 2, 3, 16))
        return hidden_states, None


def test_what_does_not_run_here_is_refused(subtests):
    for ask, reason in [
        (lambda cache, kv: cache.get_linear_cache(0), "get_linear_cache"),
        (lambda cache, kv: cache.update(kv, kv, 1), "layer 1 keeps K and V, and attends by itself"),
        (lambda cache, kv: 1 / 0, "ZeroDivisionError"),
    ]:
        with subtests.test("what a definition asks in vain is the reason to refuse it", ask=ask):
            model = made("llama")
            model.model.layers[1].self_attn = Attention(ask)
            with pytest.raises(ConfigError, match=reason):
                probe(model)
    with subtests.test("memory that is short may be there another time"):

        def ask(cache, kv):
            raise torch.OutOfMemoryError("CUDA out of memory")

        model = made("llama")
        model.model.layers[1].self_attn = Attention(ask)
        with pytest.raises(Unavailable):
            probe(model)
    with subtests.test("full attention of two shapes is refused"):
        narrow, wide = (
            LlamaForCausalLM(LlamaConfig(**SMALL, head_dim=head_dim)).eval() for head_dim in (16, 32)
        )
        narrow.model.layers[1].self_attn = WithOwnRope(wide.model.layers[1].self_attn)
        narrow.set_attn_implementation("eager")
        with pytest.raises(ConfigError, match="of 2 shapes: 2 heads of 16 and 16, 2 heads of 32 and 32"):
            attention_groups(probe(narrow).calls)


SMALL = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=64)


class WithOwnRope(torch.nn.Module):
    """This attention has another head_dim than the rest."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.config = attention.config

    def forward(self, hidden_states, position_embeddings, **kwargs):
        cos, sin = (torch.cat([part, part], dim=-1) for part in position_embeddings)
        self.attention.config._attn_implementation = "isthmus_probe"
        return self.attention(hidden_states=hidden_states, position_embeddings=(cos, sin), **kwargs)
