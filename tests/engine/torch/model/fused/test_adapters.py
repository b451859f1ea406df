"""Layers that are fused compute adapters, too, and are what they were once the last one is dropped."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from exactness.adapters import ATTENTION, adapter_of, merged
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import random_prompt, reference_model
from services.engine.torch.adapters import TorchAdapters
from services.engine.torch.checkpoint import LOADING
from services.engine.torch.model.fused.fuse import fuse
from services.engine.torch.model.fused.plain_kernels import PLAIN
from services.engine.torch.model.model_probe import probe
from services.values.errors import ConfigError

IDS = torch.tensor([random_prompt(30, 1)])


def sizes_of(model):
    whole = probe(model).whole_linears
    return {
        name: (each.in_features, each.out_features) for name, each in model.named_modules() if each in whole
    }


@torch.inference_mode()
def test_a_fused_model_computes_them_for_the_rows_that_ask():
    base = tiny_checkpoint()
    with LOADING:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    adapters = TorchAdapters(model, sizes_of(model), model.device)
    fused = fuse(model, kernels=PLAIN)
    assert fused.num_products and fused.num_activations
    types = [type(each) for each in model.modules()]
    before = model(IDS).logits
    directories = {"all": adapter_of(base, "all"), "half": adapter_of(base, "half", ATTENTION, 3, 2)}
    read = {name: adapters.read(name, directory) for name, directory in directories.items()}
    for each in read.values():
        adapters.put(each)
    for name, directory in directories.items():
        chunk = SimpleNamespace(token_ids=IDS[0], adapter=read[name].adapter)
        with adapters.computing([chunk]):
            computed = model(IDS).logits
        expected = reference_model(merged(base, directory))(IDS).logits
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-3 * expected.std().item())
    assert model(IDS).logits.equal(before)
    for each in read.values():
        adapters.drop(each.adapter)
    assert [type(each) for each in model.modules()] == types and not adapters.loaded
    assert model(IDS).logits.equal(before)


def test_layers_that_cannot_have_one_are_named():
    base = tiny_checkpoint()
    model = reference_model(base)
    adapters = TorchAdapters(model, sizes_of(model), model.device)
    with pytest.raises(ConfigError, match="layer lm_head of the model cannot have one"):
        adapters.read("head", adapter_of(base, "head", ("lm_head",)))
    other = adapter_of(tiny_checkpoint("llama", num_kv_heads=1), "other")
    with pytest.raises(ConfigError, match="has \\(inputs, outputs\\)"):
        adapters.read("other", other)
    with pytest.raises(ConfigError, match="damaged"):
        broken = adapter_of(base, "broken")
        (broken / "adapter_model.safetensors").write_bytes(b"none")
        adapters.read("broken", broken)
