"""The kernels that draw, over a large vocabulary, on the device."""

import pytest
import torch

from services.engine.torch.device import open_device
from services.engine.torch.sampling.device_sampler import DeviceSampler, require_same_choices

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [151_936, 50_257, 262_144])
def test_they_choose_what_torch_does(device, dtype, vocab_size):
    vocab_size = vocab_size if device == "cuda" else 300
    require_same_choices(DeviceSampler(open_device(device), vocab_size), dtype)
