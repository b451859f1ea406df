import pytest
import torch
from torch import nn

from services.engine.torch.packed_linear import PackedLinear, pack_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 16, 18, 61, 100])
def test_a_packed_layer_computes_what_the_plain_one_does(num_rows, bias, dtype):
    generator = torch.Generator().manual_seed(num_rows)
    linear = nn.Linear(96, 40, bias=bias, dtype=dtype)
    rows = torch.randn(1, num_rows, 96, generator=generator).to(dtype)
    model = nn.ModuleDict({"inner": nn.Sequential(linear)})
    with torch.inference_mode():
        expected = linear(rows)
        pack_linears(model)
        got = model["inner"](rows)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_every_linear_layer_is_packed_that_can_be():
    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(8, 8), nn.Linear(8, 8, dtype=torch.float64))
    pack_linears(model)
    kinds = [type(layer) for layer in model]
    # Where oneDNN is missing, nothing is packed.
    first = PackedLinear if torch.backends.mkldnn.is_available() else nn.Linear
    assert kinds == [first, nn.Embedding, nn.Linear]
