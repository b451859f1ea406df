"""A layer takes so many operations of torch and kernels of Triton in a step of single tokens.

They are counted on a CPU, on the way that a GPU's steps go: what Triton does there does nothing here.
"""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from services.cli.model.make_model import make_model
from services.engine.paged.model_runner import Chunk
from services.engine.torch import pools as runner_pools
from services.engine.torch.attention import paged_attention
from services.engine.torch.attention.page_pieces import OnDevice
from services.engine.torch.checkpoint import load_model, open_checkpoint
from services.engine.torch.model import packed_model
from services.engine.torch.model.fused import fuse
from services.engine.torch.model.fused.plain_kernels import Kernels
from services.engine.torch.model.fused.residuals import Residuals
from services.engine.torch.model.packed_model import PackedModel
from services.engine.torch.pools import Pools
from services.kv.tails import PoolSizes
from services.values.kv import PageId
from services.values.request import SamplingParams

CPU = torch.device("cpu")
NOT_LAUNCHED = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "detach", "_unsafe_view"}


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name not in NOT_LAUNCHED and not self._is_view(function, args, output):
            self.counts[name] += 1
        return output

    def _is_view(self, function, args, output):
        if function._schema.is_mutable:
            return False
        inputs, outputs = (
            {each.untyped_storage().data_ptr() for each in tree_flatten(some)[0] if torch.is_tensor(each)}
            for some in (args, output)
        )
        return outputs <= inputs


@pytest.fixture
def launched(monkeypatch):
    """Count launches of Triton's kernels, too, none of which computes anything."""
    launches = Launches()

    def normalize(rows, weight, form):
        launches.counts["normalize"] += 1
        return torch.empty_like(rows)

    def add_and_normalize(first, second, total, weight, form):
        launches.counts["add_and_normalize"] += 1
        return torch.empty_like(total)

    def rotate(query, key, cos, sin, form):
        launches.counts["rotate"] += 1
        return tuple(torch.empty_like(each.transpose(1, 2)).transpose(1, 2) for each in (query, key))

    def activate(gate, up, activation):
        launches.counts["activate"] += 1
        return gate.new_empty(gate.shape)

    def attend(view, query, kv, layer, scores, output):
        query.contiguous()
        launches.counts["attend"] += 2

    def store(key, value, view, layer):
        launches.counts["store"] += 1

    monkeypatch.setattr(
        runner_pools, "choose_in_place", lambda kv, heads: tuple(OnDevice(attend, 4, 264) for _ in kv)
    )
    monkeypatch.setattr(paged_attention, "store_layer", store)
    for name in ("even_activations", "fuse_norms"):
        monkeypatch.setattr(packed_model, name, lambda model: None)
    for most in ("MOST_UNLIKE", "_MOST_UNLIKE_FAR"):  # what computes nothing passes no trial
        monkeypatch.setattr(f"services.engine.torch.model.fused.known_operations.{most}", 1.0)
    monkeypatch.setattr("services.engine.torch.model.fused.known_operations._adds_alike", lambda *args: True)
    return launches, Kernels(normalize, rotate, activate, add_and_normalize)


def launches_of_step(directory, num_layers, launched, is_captured=False, batch=3):
    launches, kernels = launched
    make_model(directory, "llama", num_layers=num_layers)
    model = PackedModel(load_model(open_checkpoint(directory, "bfloat16"), CPU))
    model.fused = fuse.fuse(model.model, model.probed.read_linears, kernels)
    pools = Pools(
        model.probed, num_pages=16, page_size=64, sizes=PoolSizes(), model_fingerprint=0, device=CPU
    )
    pages = [[PageId(4 * i + page) for page in range(4)] for i in range(batch)]
    chunks = [Chunk([5], 200, own, True, SamplingParams(temperature=0)) for own in pages]
    residuals = Residuals(model.fused)
    for _ in range(2 if is_captured else 1):
        launches.counts.clear()
        with torch.inference_mode(), launches, residuals.fusing() if is_captured else nullcontext():
            model.compute(pools, chunks, list(range(batch)))
    pools.close()
    return launches.counts.copy()


def launches_of_layer(directory, launched, is_captured):
    few = launches_of_step(directory / "2", 2, launched, is_captured)
    more = launches_of_step(directory / "4", 4, launched, is_captured)
    more.subtract(few)
    return {name: count / 2 for name, count in more.items() if count}


def test_a_layer_of_a_llama_is_few_launches(launched, tmp_path, subtests):
    of_layer = {"linear": 4, "rotate": 1, "store": 1, "attend": 2, "activate": 1}
    for is_captured, norms in [(False, {"normalize": 2, "add": 2}), (True, {"add_and_normalize": 2})]:
        with subtests.test(is_captured=is_captured):
            counts = launches_of_layer(tmp_path / str(is_captured), launched, is_captured)
            assert counts == of_layer | norms
            assert sum(counts.values()) == (11 if is_captured else 13)
