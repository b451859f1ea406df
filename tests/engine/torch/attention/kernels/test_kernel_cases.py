"""The cases that GPU kernels are held against, with one that is plain."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.torch.attention.kernels.kernel_cases import Layout, attended, steps
from engine.torch.attention.kernels.plain_parts import attend_parts_plainly


@given(
    step=steps(),
    group=st.sampled_from([1, 4]),
    head_dims=st.sampled_from([(8, 8), (12, 6), (6, 12)]),
    num_programs=st.sampled_from([1, 264]),
    seed=st.integers(0, 99),
)
def test_parts_joined_are_the_whole(step, group, head_dims, num_programs, seed):
    layout = Layout(torch.float32, head_dims[0], group, head_dims[1])
    output, expected = attended(attend_parts_plainly, step, layout, num_programs, seed)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
