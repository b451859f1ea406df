import itertools

import torch
from torch import nn

from services.engine.torch.linear_kernel import PackedLinear, PanelLinear, pack_linears


def test_a_packed_layer_computes_as_the_plain_one_and_the_same_beside_others(subtests):
    for num_rows, bias, dtype, num_threads in itertools.product(
        [0, 1, 2, 4, 16, 18, 61, 100], [False, True], [torch.float32, torch.bfloat16], [1, 2]
    ):
        with subtests.test(
            "a packed layer computes what the plain one does",
            num_rows=num_rows,
            bias=bias,
            dtype=dtype,
            num_threads=num_threads,
        ):
            generator = torch.Generator().manual_seed(num_rows)
            linear = nn.Linear(96, 40, bias=bias, dtype=dtype)
            rows = torch.randn(1, num_rows, 96, generator=generator).to(dtype)
            model = nn.ModuleDict({"inner": nn.Sequential(linear)})
            with torch.inference_mode():
                expected = linear(rows)
                pack_linears(model, num_threads)
                got = model["inner"](rows)
            tolerance = 1e-5 if dtype == torch.float32 else 0.02
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    # torch computes a tensor's last numbers by another formula: rows have gaps between.
    for width, kind in itertools.product([4, 24, 40], [PanelLinear, PackedLinear]):
        with subtests.test("what is left over of a row is the same beside others", width=width, kind=kind):
            rows = 9 * torch.randn(1, 90, 96, generator=torch.Generator().manual_seed(width))
            with torch.inference_mode():
                layer = kind(nn.Linear(96, width))
                alone = torch.cat([layer(rows[:, [row]]).sigmoid() for row in range(90)], dim=1)
                for num_rows in (2, 9, 33, 90):
                    assert torch.equal(layer(rows[:, :num_rows]).sigmoid(), alone[:, :num_rows])


def test_every_linear_layer_is_packed_that_can_be(subtests):
    for num_threads, kind in [(1, PanelLinear), (2, PackedLinear)]:
        with subtests.test(num_threads=num_threads):
            model = nn.Sequential(
                nn.Linear(8, 8),
                nn.Embedding(8, 8),
                nn.Linear(8, 8, dtype=torch.float64),
                nn.Linear(8, 8, dtype=torch.bfloat16),
            )
            pack_linears(model, num_threads)
            # Where oneDNN is missing, or knows no bfloat16, what it would compute stays as it is.
            has_any = torch.backends.mkldnn.is_available()
            has_bfloat16 = has_any and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            first = kind if kind is PanelLinear or has_any else nn.Linear
            last = PackedLinear if has_bfloat16 else nn.Linear
            assert [type(layer) for layer in model] == [first, nn.Embedding, nn.Linear, last]
