"""Stand-ins for CUDA tell what is said to it: where these tests run there is none."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from services.engine.torch.device import abandon_step, finish_step, open_device, send, warn_if_slow

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def cudnn():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield torch.backends.cuda.cudnn_sdp_enabled
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.fixture
def waited_for(monkeypatch):
    """Streams and devices, in the order in which they were."""
    waited = []

    def current_stream(device):
        return SimpleNamespace(synchronize=lambda: waited.append(("stream", device)))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(("device", device)))
    return waited


def test_on_a_gpu_alone_nothing_attends_by_cudnn(subtests, cudnn):
    with subtests.test("on a cpu nothing is switched"):
        assert open_device("cpu") == CPU
        assert cudnn()
    for name, index in [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)]:
        with (
            subtests.test("on a gpu nothing attends by cudnn", name=name),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
            assert open_device(name) == torch.device("cuda", index)
            assert not cudnn()


def test_steps_are_waited_for_on_a_gpu_alone(subtests, waited_for):
    with subtests.test("on a cpu nobody waits"):
        finish_step(CPU)
        abandon_step(CPU, ValueError())
        assert waited_for == []
    with subtests.test("a step is over with its stream and a failed one with its device"):
        finish_step(GPU)
        assert waited_for == [("stream", GPU)]
        abandon_step(GPU, ValueError())
        assert waited_for == [("stream", GPU), ("device", GPU)]
    with (
        subtests.test("a device that cannot be waited for does not hide why the step failed"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):

        def broken(device):
            raise RuntimeError("an illegal memory access")

        monkeypatch.setattr(torch.cuda, "synchronize", broken)
        error = ValueError("a mistake of the host's")
        abandon_step(GPU, error)
        assert error.__notes__ == ["cuda:1 could not be waited for: an illegal memory access"]


def test_half_precision_without_its_instructions_is_told(monkeypatch, caplog):
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported")
    for name in names:
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    for device, dtype in ((CPU, torch.float32), (GPU, torch.bfloat16)):
        warn_if_slow(device, dtype)
    assert not caplog.messages
    for dtype in (torch.bfloat16, torch.float16):
        warn_if_slow(CPU, dtype)
        assert caplog.messages[-1].startswith(f"half_precision_is_slow dtype={str(dtype)[6:]} reason=")
    for name in names:
        monkeypatch.setattr(torch.cpu, name, lambda: True)
    warn_if_slow(CPU, torch.bfloat16)
    warn_if_slow(CPU, torch.float16)
    assert len(caplog.messages) == 2


def test_arrays_are_sent_as_they_are(monkeypatch):
    arrays = [np.array(numbers, np.int64) for numbers in ([3, 1], [], [7])]
    assert [sent.tolist() for sent in send(arrays, CPU)] == [[3, 1], [], [7]]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a graph is captured"):
        send(arrays, GPU)
