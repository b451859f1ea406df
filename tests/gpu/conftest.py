"""The device under test, which `make gpu` names; cpu is a rehearsal, with the kernels in an interpreter."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def device():
    name = os.environ.get("ISTHMUS_GPU_DEVICE", "cuda")
    assert name == "cpu" or torch.cuda.is_available(), "torch sees no CUDA device"
    return name
