"""What another start may be spared is no refusal."""

import errno

import pytest
import torch

from services.engine.start_fault import may_pass, reading, start_fault
from services.values.errors import ConfigError, Unavailable


def from_origin(error, origin):
    """As a library raises it that has met `origin`."""
    try:
        try:
            raise origin
        except Exception as met:
            raise error from met
    except Exception as raised:
        return raised


def test_what_may_pass_what_stays_and_what_is_named(subtests):
    for error in [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EMFILE, "Too many open files"),
        TimeoutError(errno.ETIMEDOUT, "timed out"),
        from_origin(ValueError("unreadable"), OSError(errno.EIO, "Input/output error")),
    ]:
        with subtests.test("what may pass", error=error):
            assert may_pass(error)
            assert isinstance(start_fault("it cannot be", error), Unavailable)
    for error in [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`"),
        torch.AcceleratorError("CUDA error: invalid device function"),
        RuntimeError("CUDA driver version is insufficient for CUDA runtime version"),
        ValueError("rope_parameters must have a rope_type"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError("model does not appear to have a file named config.json"),
        from_origin(ValueError("unreadable"), KeyError("dtype")),
    ]:
        with subtests.test("what stays", error=error):
            assert not may_pass(error)
            assert isinstance(start_fault("it cannot be", error), ConfigError)
    for number, raised in [(errno.EIO, Unavailable), (errno.ENOENT, ConfigError)]:
        with (
            subtests.test("what cannot be read is named", number=number),
            pytest.raises(raised, match=r"the checkpoint m cannot be read: .*no luck"),
            reading("the checkpoint m"),
        ):
            raise OSError(number, "no luck")
