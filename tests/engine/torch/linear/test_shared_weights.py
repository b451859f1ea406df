"""Weights in files: the same numbers, held once."""

import os
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from services.engine.torch import shared_weights
from services.engine.torch.linear_kernel import pack_linears
from services.engine.torch.shared_weights import SharedWeights, share_parameters

CONTENT = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)


def test_the_same_bytes_are_one_file(subtests, tmp_path_factory, caplog):
    with subtests.test("the same bytes are one file whoever asks"):
        tmp_path = tmp_path_factory.mktemp("own")
        for _ in range(2):
            found = SharedWeights(tmp_path).shared(CONTENT)
            assert np.array_equal(found, CONTENT) and is_mapped(found)
            assert found.flags.writeable  # or numba would compile its kernels anew
            assert found.ctypes.data % 64 == 0
        other = CONTENT.copy()
        other[500] ^= 1
        assert np.array_equal(SharedWeights(tmp_path).shared(other), other)
        assert len([*tmp_path.iterdir()]) == 2
    with subtests.test("writing to what is mapped changes nobody elses"):
        tmp_path = tmp_path_factory.mktemp("own")
        first, second = (SharedWeights(tmp_path).shared(CONTENT) for _ in range(2))
        first[0] ^= 1
        assert np.array_equal(second, CONTENT)
    with subtests.test("a file that is not what its name says is not used"):
        tmp_path = tmp_path_factory.mktemp("own")
        caplog.clear()
        SharedWeights(tmp_path).shared(CONTENT)
        (path,) = tmp_path.iterdir()
        for wrong in (CONTENT[::-1].tobytes(), CONTENT[:-1].tobytes(), b"x"):
            path.chmod(0o600)
            path.write_bytes(wrong)
            assert np.array_equal(SharedWeights(tmp_path).shared(CONTENT), CONTENT)
            assert path.read_bytes() == CONTENT.tobytes()
        assert caplog.text.count("shared_weights_differ") == 3
    for fault in ["no folder", "full disk"]:
        with (
            subtests.test("where there is no room weights stay our own", fault=fault),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            tmp_path = tmp_path_factory.mktemp("own")
            caplog.clear()
            folder = tmp_path / "file" / "weights" if fault == "no folder" else tmp_path
            (tmp_path / "file").touch()
            monkeypatch.setattr(shared_weights, "_LEFT_FREE_BYTES", 1 << 60)
            weights = SharedWeights(folder)
            assert all(weights.shared(CONTENT) is CONTENT for _ in range(2))
            assert caplog.text.count("weights_not_shared") == 1
            assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_files_that_nobody_needs_go(subtests, tmp_path_factory):
    with subtests.test("what nobody asks for goes"):
        tmp_path = tmp_path_factory.mktemp("own")
        weights = SharedWeights(tmp_path)
        kept, left = (weights.shared(CONTENT[:size]) for size in (1000, 2000))
        for path in tmp_path.iterdir():
            os.utime(path, times=(time.time() - 8 * 24 * 3600,) * 2)
        weights.shared(CONTENT[:1000])
        SharedWeights(tmp_path)
        assert [path.stat().st_size for path in tmp_path.iterdir()] == [1000]
        assert np.array_equal(left, CONTENT[:2000]) and np.array_equal(kept, CONTENT[:1000])
    with (
        subtests.test("what nobody finished goes after an hour"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        tmp_path = tmp_path_factory.mktemp("own")

        def killed(*names):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "link", killed)
        kept = partial(tempfile.NamedTemporaryFile, delete=False)  # as of a process that is gone
        monkeypatch.setattr(tempfile, "NamedTemporaryFile", kept)
        with pytest.raises(KeyboardInterrupt):
            SharedWeights(tmp_path).shared(CONTENT)
        monkeypatch.undo()
        (left,) = tmp_path.iterdir()
        SharedWeights(tmp_path).shared(CONTENT)
        for age_s, num_files in ((1800, 2), (2 * 3600, 1)):
            for path in tmp_path.iterdir():
                os.utime(path, times=(time.time() - age_s,) * 2)
            SharedWeights(tmp_path)
            assert len([*tmp_path.iterdir()]) == num_files
        assert not left.exists()


def test_a_model_computes_the_same_bits_with_shared_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_weights, "_FEWEST_BYTES", 1000)
    results, tables = [], []
    for weights in (None, SharedWeights(tmp_path), SharedWeights(tmp_path)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 96), nn.LayerNorm(96), nn.Linear(96, 50), nn.Linear(50, 40))
        model[2].weight = model[0].weight  # as tied embeddings are
        with torch.inference_mode():
            pack_linears(model, 1, (), weights)
        if weights is not None:
            share_parameters(model, weights)
        tables.append(model[0].weight)
        with torch.inference_mode():
            results.append(model(torch.arange(50)[None]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert [is_mapped(table.detach().numpy()) for table in tables] == [False, True, True]


def is_mapped(array):
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return int(line.split()[4]) != 0
    raise AssertionError("it lies nowhere")
