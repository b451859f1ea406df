"""What is said to CUDA, by stand-ins for it: where these tests run there is none."""

import pytest
import torch

from services.engine.torch.device import open_device


@pytest.fixture
def cudnn():
    """Whether torch may attend by cuDNN: a switch of the process."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield torch.backends.cuda.cudnn_sdp_enabled
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_on_a_gpu_nothing_attends_by_cudnn(name, index, cudnn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert open_device(name) == torch.device("cuda", index)
    assert not cudnn()


def test_on_a_cpu_nothing_is_switched(cudnn):
    assert open_device("cpu") == torch.device("cpu")
    assert cudnn()
