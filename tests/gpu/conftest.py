"""The device under test, which `make gpu` names; cpu is a rehearsal, with the kernels in an interpreter."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    name = os.environ.get("ISTHMUS_GPU_DEVICE", "cuda")
    assert name == "cpu" or torch.cuda.is_available(), "torch sees no CUDA device"
    return name
