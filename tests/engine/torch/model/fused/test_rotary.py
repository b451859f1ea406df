import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from services.engine.torch.model.fused.rotary import fuse_rotations, fused

SIZES = {
    "vocab_size": 16,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}


def heads_of(num_tokens, num_heads, head_dim, *, by_token, dtype=torch.float32):
    if by_token:
        return torch.randn(1, num_tokens, num_heads, head_dim).to(dtype).transpose(1, 2)
    return torch.randn(1, num_heads, num_tokens, head_dim).to(dtype)


@given(
    num_tokens=st.integers(1, 40),
    num_heads=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 40),
    by_token=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 30),
)
def test_one_call_gives_the_same_bits(num_tokens, num_heads, kv_heads, half, by_token, dtype, seed):
    torch.manual_seed(seed)
    q = heads_of(num_tokens, num_heads, 2 * half, by_token=by_token, dtype=dtype)
    k = heads_of(num_tokens, kv_heads, 2 * half, by_token=by_token, dtype=dtype)
    cos, sin = torch.randn(2, 1, num_tokens, 2 * half).to(dtype)
    wanted = apply_rotary_pos_emb(q, k, cos, sin)
    given_before = [each.clone() for each in (q, k, cos, sin)]
    rotated = fused(apply_rotary_pos_emb)(q, k, cos, sin)
    assert [each.dtype for each in rotated] == [dtype, dtype]
    assert all(torch.equal(one, other) for one, other in zip(rotated, wanted, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(given_before, (q, k, cos, sin), strict=True))


def test_what_is_not_a_llamas_rotation_stays_as_it_is(subtests):
    for q, k, cos, named in [
        ((2, 4, 3, 8), (2, 4, 3, 8), (2, 3, 8), {}),  # of-several-sequences
        ((1, 4, 3, 8), (1, 4, 3, 8), (1, 1, 8), {}),  # of-one-place
        ((1, 3, 4, 8), (1, 3, 2, 8), (1, 3, 8), {"unsqueeze_dim": 2}),  # tokens-first
        ((1, 4, 3, 8), (1, 4, 3, 8), (3, 8), {"unsqueeze_dim": 0}),  # of-no-batch
    ]:
        with subtests.test("what the kernel does not take goes where it went", q=q):
            numbers = [torch.randn(shape) for shape in (q, k, cos, cos)]
            rotated = fused(apply_rotary_pos_emb)(*numbers, **named)
            for one, other in zip(rotated, apply_rotary_pos_emb(*numbers, **named), strict=True):
                assert torch.equal(one, other)
    for made, config, is_fused in [
        (LlamaForCausalLM, LlamaConfig, True),
        (Qwen3ForCausalLM, Qwen3Config, True),
        (GemmaForCausalLM, GemmaConfig, True),
        (GptOssForCausalLM, GptOssConfig, False),  # turns halves that are not repeated
    ]:
        with subtests.test("those are fused that are llamas", made=made):
            model = made(config(**SIZES))
            fuse_rotations(model)
            changed = [type(module).__name__ for module in model.modules() if "forward" in vars(module)]
            assert changed == [made.__name__.removesuffix("ForCausalLM") + "Attention"] * 2 * is_fused
