import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from services.engine.torch.model.norms import fuse_norms

SIZES = {
    "vocab_size": 16,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
}


def norms_of(made: type, config: PreTrainedConfig, dtype: torch.dtype) -> list[torch.nn.Module]:
    torch.manual_seed(1)
    model = made(config).to(dtype)
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    for norm in norms:
        norm.weight.data.normal_()
    fuse_norms(model)
    return norms


@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_a_norm_that_is_one_call_gives_the_same_bits(num_rows):
    norms = norms_of(LlamaForCausalLM, LlamaConfig(**SIZES), torch.float32)
    rows = torch.randn(1, num_rows, 24)
    assert len(norms) == 3
    for norm in norms:
        assert "forward" in vars(norm)
        assert torch.equal(norm(rows), type(norm).forward(norm, rows))


@pytest.mark.parametrize(
    ("made", "config", "dtype"),
    [
        pytest.param(Gemma2ForCausalLM, Gemma2Config, torch.float32, id="one-is-added-to-the-weight"),
        pytest.param(LlamaForCausalLM, LlamaConfig, torch.bfloat16, id="rounded-before-the-weight"),
    ],
)
def test_a_norm_that_computes_something_else_stays_as_it_is(made, config, dtype):
    norms = norms_of(made, config(**SIZES), dtype)
    assert norms
    assert not any("forward" in vars(norm) for norm in norms)
