import errno
import itertools
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import set_tqdm_hook, tqdm

from exactness.checkpoints import tiny_checkpoint
from services.engine.torch.checkpoint import (
    load_model,
    model_fingerprint,
    open_checkpoint,
    reporting_progress,
)
from services.values.errors import ConfigError, Unavailable

CPU = torch.device("cpu")


def copied(tmp_path_factory):
    return shutil.copytree(tiny_checkpoint(), tmp_path_factory.mktemp("copied") / "model")


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory, edit):
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_opens_as_what_its_config_says(subtests, tmp_path_factory):
    with subtests.test("a checkpoint opens in its own dtype or another"):
        checkpoint = copied(tmp_path_factory)
        assert open_checkpoint(checkpoint).dtype == torch.float32
        opened = open_checkpoint(checkpoint, "bfloat16")
        assert opened.dtype == torch.bfloat16
        assert load_model(opened, CPU).dtype == torch.bfloat16
    with subtests.test("stretched angles lengthen the context"):
        checkpoint = copied(tmp_path_factory)
        assert open_checkpoint(checkpoint).max_context_tokens == 4096
        yarn = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
        }
        for key in ("rope_parameters", "rope_scaling"):
            edit_config(checkpoint, **{"rope_parameters": None, key: yarn})
            assert open_checkpoint(checkpoint).max_context_tokens == 8192
    with subtests.test("without a named dtype the weights tell"):
        checkpoint = copied(tmp_path_factory)
        edit_config(checkpoint, dtype=None)
        edit_weights(checkpoint, lambda w: w.update({name: t.half() for name, t in w.items()}))
        assert open_checkpoint(checkpoint).dtype == torch.float16
    with subtests.test("the text model of a composite checkpoint is what is made"):
        # As Qwen3.5 is published: its config within another's, its weights a level deeper.
        tmp_path = tmp_path_factory.mktemp("own")
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
        assert all(
            torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items()
        )
    with subtests.test("the loaded model has the weights of the files"):
        checkpoint = copied(tmp_path_factory)
        model = load_model(open_checkpoint(checkpoint), CPU)
        assert model.config._attn_implementation == "isthmus_paged"
        saved = load_file(checkpoint / "model.safetensors")
        assert saved.keys() == model.state_dict().keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    with subtests.test("of several architectures one must agree"):
        checkpoint = copied(tmp_path_factory)
        edit_config(checkpoint, architectures=["Qwen3ForCausalLM", "LlamaForCausalLM", "Unheard"])
        open_checkpoint(checkpoint)


def test_a_missing_or_damaged_file_is_refused(subtests, tmp_path_factory):
    with subtests.test("a missing directory is refused"):
        tmp_path = tmp_path_factory.mktemp("own")
        with pytest.raises(ConfigError, match="no checkpoint directory"):
            open_checkpoint(tmp_path / "nowhere")
    for name in ["config.json", "model.safetensors"]:
        with subtests.test("a missing file is named", name=name):
            checkpoint = copied(tmp_path_factory)
            (checkpoint / name).unlink()
            with pytest.raises(ConfigError, match=name):
                open_checkpoint(checkpoint)
    with subtests.test("a missing shard is named"):
        checkpoint = copied(tmp_path_factory)
        (checkpoint / "model.safetensors").rename(checkpoint / "a.safetensors")
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ConfigError, match=r"missing \['b.safetensors'\]"):
            open_checkpoint(checkpoint)
    for name in ["config.json", "model.safetensors"]:
        with subtests.test("a damaged file is refused", name=name):
            checkpoint = copied(tmp_path_factory)
            (checkpoint / name).write_bytes(b"no such thing")
            with pytest.raises(ConfigError):
                open_checkpoint(checkpoint)


def test_what_we_cannot_run_is_refused(subtests, tmp_path_factory):
    for changes, reason in [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is of model_type 'gpt.*, not 'llama'"),
        ({"architectures": None, "model_type": "clip"}, "no model that generates text"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized by 'hqq' are not served"),
        ({"text_config": {"quantization_config": {"quant_method": "quark"}}}, "quantized by 'quark'"),
        ({"dtype": "float64"}, "float64"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}, "dynamic"),
    ]:
        with subtests.test("what we cannot run is refused with the reason", changes=changes):
            checkpoint = copied(tmp_path_factory)
            edit_config(checkpoint, **changes)
            with pytest.raises(ConfigError, match=reason):
                open_checkpoint(checkpoint)
    # transformers would make a Gemma of what says it is a Llama: their weights have the same names.
    for model_type in ["gemma", "granite", "cohere", "olmo", "phi3", "mistral", "qwen3", None]:
        with subtests.test(
            "a model type that disagrees with the architecture is refused", model_type=model_type
        ):
            checkpoint = copied(tmp_path_factory)
            edit_config(checkpoint, model_type=model_type)
            with pytest.raises(
                ConfigError, match=f"LlamaForCausalLM is of model_type .*'llama', not {model_type!r}"
            ):
                open_checkpoint(checkpoint)
    for changes in [
        {"num_attention_heads": "4"},
        {"num_attention_heads": 7},
        {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}},
    ]:
        with subtests.test("a config that contradicts itself is refused", changes=changes):
            checkpoint = copied(tmp_path_factory)
            edit_config(checkpoint, **changes)
            with pytest.raises(ConfigError, match="cannot be"):
                load_model(open_checkpoint(checkpoint), CPU)
    with subtests.test("a model that looks ahead is refused"):
        checkpoint = copied(tmp_path_factory)
        edit_config(checkpoint, is_causal=False)
        with pytest.raises(ConfigError, match="both directions"):
            open_checkpoint(checkpoint)


def test_weights_are_never_invented(subtests, tmp_path_factory):
    with subtests.test("a missing or misshapen weight is refused and never invented"):
        checkpoint = copied(tmp_path_factory)
        edit_weights(checkpoint, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
        with pytest.raises(ConfigError, match="up_proj"):
            load_model(open_checkpoint(checkpoint), CPU)
    with subtests.test("weights that were cut short are refused"):
        # An interrupted copy: the header is whole, and says what is not there.
        checkpoint = copied(tmp_path_factory)
        weights = checkpoint / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4096])
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load_model(open_checkpoint(checkpoint), CPU)
    with subtests.test("a misshapen weight is refused"):
        checkpoint = copied(tmp_path_factory)
        edit_weights(checkpoint, lambda w: w.update({"lm_head.weight": torch.zeros(7, 64)}))
        with pytest.raises(ConfigError, match=r"cannot be loaded|misshapen"):
            load_model(open_checkpoint(checkpoint), CPU)


def test_damaged_indices_and_headers_are_refused(subtests, tmp_path_factory):
    checkpoint = copied(tmp_path_factory)
    weights = checkpoint / "model.safetensors"
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for content in (
        [1],
        {"a": 3},
        {"a": {**entry, "data_offsets": [0]}},
        {"a": {**entry, "data_offsets": [-4, 0]}},
        {"a": {**entry, "data_offsets": None}},
        {"a": {"shape": [0]}},
    ):
        with subtests.test("a safetensors header", content=content):
            header = json.dumps(content).encode()
            weights.write_bytes(len(header).to_bytes(8, "little") + header)
            with pytest.raises(ConfigError, match="a safetensors header"):
                open_checkpoint(checkpoint)
    weights.unlink()
    for files in (None, [1], {"a": 1}):
        with subtests.test("an index", files=files):
            (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
            with pytest.raises(ConfigError, match="no weight_map"):
                open_checkpoint(checkpoint)


def test_the_fingerprint_is_of_what_computes(subtests, tmp_path_factory):
    with subtests.test("copies have one fingerprint of 64 bits"):
        checkpoint = copied(tmp_path_factory)
        assert model_fingerprint(checkpoint) == model_fingerprint(tiny_checkpoint())
        assert 0 <= model_fingerprint(checkpoint) < 2**64
    with subtests.test("what computes nothing leaves the fingerprint"):
        checkpoint = copied(tmp_path_factory)
        before = model_fingerprint(checkpoint)
        edit_config(checkpoint, transformers_version="0.0.1", use_cache=False)
        (checkpoint / "README.md").write_text("words")
        assert model_fingerprint(checkpoint) == before
    with subtests.test("another seed architecture or setting has another fingerprint"):
        checkpoint = copied(tmp_path_factory)
        fingerprints = {model_fingerprint(tiny_checkpoint(seed=seed)) for seed in range(4)}
        fingerprints.add(model_fingerprint(tiny_checkpoint("qwen2")))
        edit_config(checkpoint, rms_norm_eps=1e-5)
        fingerprints.add(model_fingerprint(checkpoint))
        assert len(fingerprints) == 6
    with subtests.test("one tensor among many changes the fingerprint"):
        checkpoint = copied(tmp_path_factory)
        before = model_fingerprint(checkpoint)
        edit_weights(checkpoint, lambda w: w["model.layers.1.self_attn.k_proj.weight"].add_(1e-3))
        assert model_fingerprint(checkpoint) != before


def fail_to_load(checkpoint, error, raised, monkeypatch):
    opened = open_checkpoint(checkpoint)

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(raised, match="cannot be loaded"):
        load_model(opened, CPU)


def test_what_fails_now_may_work_another_time(subtests, tmp_path_factory):
    for error, raised in [
        (torch.OutOfMemoryError("CUDA out of memory"), Unavailable),
        (OSError(errno.EIO, "Input/output error"), Unavailable),
        (OSError(errno.EACCES, "Permission denied"), ConfigError),
        (ValueError("no such rope"), ConfigError),
    ]:
        with (
            subtests.test("weights that do not load now may load another time", error=error),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            checkpoint = copied(tmp_path_factory)
            fail_to_load(checkpoint, error, raised, monkeypatch)
    for read, (number, raised) in itertools.product(
        [open_checkpoint, model_fingerprint], [(errno.ESTALE, Unavailable), (errno.EACCES, ConfigError)]
    ):
        with (
            subtests.test(
                "files that cannot be read now may be another time", read=read, number=number, raised=raised
            ),
            pytest.MonkeyPatch.context() as monkeypatch,
        ):
            checkpoint = copied(tmp_path_factory)
            fail_to_read(checkpoint, read, number, raised, monkeypatch)


def fail_to_read(checkpoint, read, number, raised, monkeypatch):
    def fail(*args, **options):
        raise OSError(number, os.strerror(number))

    for verb in ("open", "read_text", "stat"):
        with monkeypatch.context() as patch, pytest.raises(raised):
            patch.setattr(Path, verb, fail)
            read(checkpoint)


def test_loading_is_told_every_two_seconds(caplog):
    caplog.set_level(logging.INFO)
    now = [0.0]
    with reporting_progress(lambda: now[0]):
        seen = []
        for name in tqdm({"a": 1, "b": 2, "c": 3, "d": 4}.items(), desc="Loading weights"):
            seen.append(name)
            now[0] += 1.0
        bar = tqdm(total=3)  # one that is not gone through
        bar.update(1)
        bar.close()
    assert [name for name, _ in seen] == ["a", "b", "c", "d"]
    assert [record.getMessage() for record in caplog.records] == ["weights_loading done=2 of=4"]
    assert set_tqdm_hook(None) is None
