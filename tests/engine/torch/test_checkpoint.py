import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from exactness.checkpoints import tiny_checkpoint
from services.engine.torch.checkpoint import load_model, model_fingerprint, open_checkpoint
from services.values.errors import ConfigError, Unavailable

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path):
    return shutil.copytree(tiny_checkpoint(), tmp_path / "model")


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory, edit):
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_opens_in_its_own_dtype_or_another(checkpoint):
    assert open_checkpoint(checkpoint).dtype == torch.float32
    opened = open_checkpoint(checkpoint, "bfloat16")
    assert opened.dtype == torch.bfloat16
    assert load_model(opened, CPU).dtype == torch.bfloat16


def test_stretched_angles_lengthen_the_context(checkpoint):
    assert open_checkpoint(checkpoint).max_context_tokens == 4096
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
    for key in ("rope_parameters", "rope_scaling"):
        edit_config(checkpoint, **{"rope_parameters": None, key: yarn})
        assert open_checkpoint(checkpoint).max_context_tokens == 8192


def test_without_a_named_dtype_the_weights_tell(checkpoint):
    edit_config(checkpoint, dtype=None)
    edit_weights(checkpoint, lambda w: w.update({name: t.half() for name, t in w.items()}))
    assert open_checkpoint(checkpoint).dtype == torch.float16


def test_the_loaded_model_has_the_weights_of_the_files(checkpoint):
    model = load_model(open_checkpoint(checkpoint), CPU)
    assert model.config._attn_implementation == "isthmus_paged"
    saved = load_file(checkpoint / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint directory"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(checkpoint, name):
    (checkpoint / name).unlink()
    with pytest.raises(ConfigError, match=name):
        open_checkpoint(checkpoint)


def test_a_missing_shard_is_named(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"missing \['b.safetensors'\]"):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_refused(checkpoint, name):
    (checkpoint / name).write_bytes(b"no such thing")
    with pytest.raises(ConfigError):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is of model_type 'gpt.*, not 'llama'"),
        ({"architectures": None, "model_type": "clip"}, "no model that generates text"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "quantized"),
        ({"dtype": "float64"}, "float64"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}, "dynamic"),
    ],
)
def test_what_we_cannot_run_is_refused_with_the_reason(checkpoint, changes, reason):
    edit_config(checkpoint, **changes)
    with pytest.raises(ConfigError, match=reason):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "model_type", ["gemma", "granite", "cohere", "olmo", "phi3", "mistral", "qwen3", None]
)
def test_a_model_type_that_disagrees_with_the_architecture_is_refused(checkpoint, model_type):
    """transformers would make a Gemma of what says it is a Llama: their weights have the same names."""
    edit_config(checkpoint, model_type=model_type)
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM is of model_type .*'llama', not {model_type!r}"):
        open_checkpoint(checkpoint)


def test_of_several_architectures_one_must_agree(checkpoint):
    edit_config(checkpoint, architectures=["Qwen3ForCausalLM", "LlamaForCausalLM", "Unheard"])
    open_checkpoint(checkpoint)


def test_the_text_model_of_a_composite_checkpoint_is_what_is_made(tmp_path):
    """As Qwen3.5 is published: its config within another's, its weights a level deeper."""
    directory = shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "model")
    path = directory / "config.json"
    text = json.loads(path.read_text())
    architectures = ["Qwen3_5ForConditionalGeneration"]
    path.write_text(
        json.dumps({"architectures": architectures, "model_type": "qwen3_5", "text_config": text})
    )

    def deepen(weights):
        for name in [name for name in weights if name.startswith("model.")]:
            weights[name.replace("model.", "model.language_model.", 1)] = weights.pop(name)
        weights["model.visual.patch_embed.proj.bias"] = torch.zeros(3)

    edit_weights(directory, deepen)
    checkpoint = open_checkpoint(directory)
    assert (checkpoint.vocab_size, checkpoint.max_context_tokens) == (512, 4096)
    assert checkpoint.dtype == torch.float32
    model, plain = (
        load_model(each, CPU) for each in (checkpoint, open_checkpoint(tiny_checkpoint("qwen3_5")))
    )
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_missing_or_misshapen_weight_is_refused_and_never_invented(checkpoint):
    edit_weights(checkpoint, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match="up_proj"):
        load_model(open_checkpoint(checkpoint), CPU)


def test_weights_that_were_cut_short_are_refused(checkpoint):
    """An interrupted copy: the header is whole, and says what is not there."""
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4096])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(open_checkpoint(checkpoint), CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": "4"},
        {"num_attention_heads": 7},
        {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}},
    ],
)
def test_a_config_that_contradicts_itself_is_refused(checkpoint, changes):
    edit_config(checkpoint, **changes)
    with pytest.raises(ConfigError, match="cannot be"):
        load_model(open_checkpoint(checkpoint), CPU)


def test_a_model_that_looks_ahead_is_refused(checkpoint):
    edit_config(checkpoint, is_causal=False)
    with pytest.raises(ConfigError, match="both directions"):
        open_checkpoint(checkpoint)


def test_a_misshapen_weight_is_refused(checkpoint):
    edit_weights(checkpoint, lambda w: w.update({"lm_head.weight": torch.zeros(7, 64)}))
    with pytest.raises(ConfigError, match=r"cannot be loaded|misshapen"):
        load_model(open_checkpoint(checkpoint), CPU)


def test_copies_have_one_fingerprint_of_64_bits(checkpoint):
    assert model_fingerprint(checkpoint) == model_fingerprint(tiny_checkpoint())
    assert 0 <= model_fingerprint(checkpoint) < 2**64


def test_what_computes_nothing_leaves_the_fingerprint(checkpoint):
    before = model_fingerprint(checkpoint)
    edit_config(checkpoint, transformers_version="0.0.1", use_cache=False)
    (checkpoint / "README.md").write_text("words")
    assert model_fingerprint(checkpoint) == before


def test_another_seed_architecture_or_setting_has_another_fingerprint(checkpoint):
    fingerprints = {model_fingerprint(tiny_checkpoint(seed=seed)) for seed in range(4)}
    fingerprints.add(model_fingerprint(tiny_checkpoint("qwen2")))
    edit_config(checkpoint, rms_norm_eps=1e-5)
    fingerprints.add(model_fingerprint(checkpoint))
    assert len(fingerprints) == 6


def test_one_tensor_among_many_changes_the_fingerprint(checkpoint):
    before = model_fingerprint(checkpoint)
    edit_weights(checkpoint, lambda w: w["model.layers.1.self_attn.k_proj.weight"].add_(1e-3))
    assert model_fingerprint(checkpoint) != before


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Unavailable),
        (OSError(errno.EIO, "Input/output error"), Unavailable),
        (OSError(errno.EACCES, "Permission denied"), ConfigError),
        (ValueError("no such rope"), ConfigError),
    ],
)
def test_weights_that_do_not_load_now_may_load_another_time(checkpoint, error, raised, monkeypatch):
    opened = open_checkpoint(checkpoint)

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(raised, match="cannot be loaded"):
        load_model(opened, CPU)


@pytest.mark.parametrize(("number", "raised"), [(errno.ESTALE, Unavailable), (errno.EACCES, ConfigError)])
@pytest.mark.parametrize("read", [open_checkpoint, model_fingerprint])
def test_files_that_cannot_be_read_now_may_be_another_time(checkpoint, read, number, raised, monkeypatch):
    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    for verb in ("open", "read_text", "stat"):
        with monkeypatch.context() as patch, pytest.raises(raised):
            patch.setattr(Path, verb, fail)
            read(checkpoint)
