"""A layer takes so many operations of torch and kernels of Triton in a step of single tokens.

They are counted on a CPU, on the way that a GPU's steps go: what Triton does there does nothing here.
"""

from collections import Counter
from contextlib import nullcontext
from operator import le

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from engine.torch.model.fused.fused_models import loaded
from services.cli.model.make_model import make_model
from services.engine.paged.model_runner import Chunk, TailPages
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


def launches_of_step(model, fused_by, launches, is_captured=False, batch=3):
    """Return the launches of a step of the model, fused by these kernels unless they are None."""
    if fused_by is not None:
        model.fused = fuse.fuse(model.model, model.probed.read_linears, fused_by)
    pools = Pools(
        model.probed,
        num_pages=32,
        page_size=64,
        sizes=PoolSizes(num_window_pages=32, num_slots=batch),
        model_fingerprint=0,
        device=CPU,
    )
    chunks = []
    for row in range(batch):
        pages = [PageId(4 * row + page) for page in range(4)]
        tails, slot = (TailPages(0, pages),) * (len(pools.layers.pools) - 1), row if pools.slots else None
        greedy = SamplingParams(temperature=0)
        chunks.append(Chunk([5], 200, pages, True, greedy, tails=tails, slot=slot))
    residuals = Residuals(model.fused)
    for _ in range(2 if is_captured else 1):
        launches.counts.clear()
        with torch.inference_mode(), launches, residuals.fusing() if is_captured else nullcontext():
            model.compute(pools, chunks, list(range(batch)))
    pools.close()
    return launches.counts.copy()


def launches_of_layer(directory, launched, is_captured):
    of_steps = []
    for num_layers in (2, 4):
        own = directory / str(num_layers)
        make_model(own, "llama", num_layers=num_layers)
        model = PackedModel(load_model(open_checkpoint(own, "bfloat16"), CPU))
        of_steps.append(launches_of_step(model, launched[1], launched[0], is_captured))
    few, more = of_steps
    more.subtract(few)
    return {name: count / 2 for name, count in more.items() if count}


def test_a_layer_of_a_llama_is_few_launches(launched, tmp_path, subtests):
    of_layer = {"linear": 4, "rotate": 1, "store": 1, "attend": 2, "activate": 1}
    for is_captured, norms in [(False, {"normalize": 2, "add": 2}), (True, {"add_and_normalize": 2})]:
        with subtests.test(is_captured=is_captured):
            counts = launches_of_layer(tmp_path / str(is_captured), launched, is_captured)
            assert counts == of_layer | norms
            assert sum(counts.values()) == (11 if is_captured else 13)


# These are the layers of tiny checkpoints, and the most launches of a step: as defined, and when it is fused
# and captured. 13 to 16 of them belong to no layer. A layer of a Llama has 11; beside these,
#   Qwen3, Gemma     norm heads of q and k, Gemma also what is added; Gemma 4 has an input for each layer
#   experts          take 20 to 28 a layer: they are chosen, rows sorted, gathered and added up (transformers'
#                    grouped products), each by an operation of torch; gpt-oss' own activation is among them
#   recurrent ones   take 40 to 70 a layer: transformers' recurrences in torch, gated norms, states
#   Llama 4          rotates complex numbers, and has a temperature for each token
MOST_LAUNCHES = {
    "llama": (2, 100, 35),
    "mistral": (2, 100, 35),
    "qwen2": (2, 100, 35),
    "qwen3": (2, 132, 39),
    "qwen3_5": (4, 353, 188),
    "qwen3_5_moe": (4, 457, 288),
    "qwen3_next": (4, 462, 295),
    "nemotron_h": (6, 215, 156),
    "falcon_h1": (2, 186, 123),
    "bamba": (4, 236, 129),
    "gpt_oss": (4, 291, 156),
    "gemma2": (4, 282, 69),
    "gemma3": (4, 368, 83),
    "gemma4": (6, 598, 172),
    "llama4": (4, 232, 125),
    "qwen3_moe": (2, 162, 73),
    "minimax_m2": (2, 178, 83),
}


@pytest.mark.exact
@pytest.mark.parametrize("family", MOST_LAUNCHES)
def test_steps_of_every_family_are_so_many_launches(family, launched, monkeypatch):
    """Other versions of transformers may launch less."""
    launches, kernels = launched
    monkeypatch.setattr(packed_model, "forward_in_place", lambda *_: None)
    counts = []
    for fused_by in (None, kernels):
        model = PackedModel(loaded(family, "bfloat16"))
        model.scan_tokens = None
        counts.append(launches_of_step(model, fused_by, launches, is_captured=fused_by is not None))
    num_layers = model.model.config.get_text_config().num_hidden_layers
    told = (num_layers, *(sum(each.values()) for each in counts))
    assert all(map(le, told, MOST_LAUNCHES[family])), (told, counts[1])


def test_what_a_layer_launches_more_is_noticed(launched, monkeypatch):
    launches, kernels = launched
    model = PackedModel(loaded("llama", "bfloat16"))
    mlp = model.model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda hidden: own(hidden) * 2
    counts = launches_of_step(model, kernels, launches, is_captured=True)
    assert sum(counts.values()) > MOST_LAUNCHES["llama"][2]
