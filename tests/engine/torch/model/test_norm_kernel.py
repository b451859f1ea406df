import numpy as np
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from services.engine.torch.model.norm_kernel import fuse_norms, rms_norm

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


def test_a_norm_is_one_call_where_it_is_a_llamas(subtests):
    for num_rows in [1, 7, 300]:
        with subtests.test("a norm that is one call is as near as its definition", num_rows=num_rows):
            norms = norms_of(LlamaForCausalLM, LlamaConfig(**SIZES), torch.float32)
            rows = torch.randn(1, num_rows, 24)
            assert len(norms) == 3
            for norm in norms:
                assert "forward" in vars(norm)
                with torch.inference_mode():
                    normed, theirs = norm(rows), type(norm).forward(norm, rows)
                precise = rows.double()
                scales = (precise.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
                exact = norm.weight.detach().double() * precise * scales
                assert normed.dtype is torch.float32
                assert (normed - exact).abs().max() <= 2 * (theirs - exact).abs().max()
    for made, config, dtype in [
        (Gemma2ForCausalLM, Gemma2Config, torch.float32),  # one-is-added-to-the-weight
        (LlamaForCausalLM, LlamaConfig, torch.bfloat16),  # rounded-before-the-weight
    ]:
        with subtests.test("a norm that computes something else stays as it is", made=made):
            norms = norms_of(made, config(**SIZES), dtype)
            assert norms
            assert not any("forward" in vars(norm) for norm in norms)


def test_rows_are_computed_each_by_itself(subtests):
    for width in [1, 7, 24, 64, 100, 512]:
        with subtests.test("a row is the same among whatever others", width=width):
            rows, weight = torch.randn(70, width).numpy(), torch.randn(width).numpy()
            alone = np.concatenate([rms_norm(row[None], weight, 1e-6) for row in rows])
            for count in (2, 33, 70):
                assert np.array_equal(rms_norm(rows[None, :count], weight, 1e-6)[0], alone[:count])
            with_gaps = np.zeros((70, 2 * width), np.float32)[:, :width]
            with_gaps[:] = rows
            assert np.array_equal(rms_norm(with_gaps, weight, 1e-6), alone)
    with subtests.test("rows that are zeros and rows that are none"):
        weight = np.ones(24, np.float32)
        assert np.array_equal(rms_norm(np.zeros((1, 2, 24), np.float32), weight, 1e-6), np.zeros((1, 2, 24)))
        assert rms_norm(np.zeros((1, 0, 24), np.float32), weight, 1e-6).shape == (1, 0, 24)
        assert np.isnan(rms_norm(np.full((1, 24), np.nan, np.float32), weight, 1e-6)).all()
