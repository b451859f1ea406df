"""A GGUF as llama.cpp would write it of a transformers model becomes that model again."""

import json
import shutil
import struct

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from model.gguf_files import (
    ARRAY,
    BOOL,
    F32,
    F32_TENSOR,
    TEXT,
    TOKENS,
    U32,
    gguf_bytes,
    llama_entries,
    write_llama,
)
from services.cli.model.fetch_model import write_checkpoint
from services.engine.choose import check_checkpoint
from services.engine.torch.checkpoint import load_model, open_checkpoint
from services.model.gguf import read_gguf
from services.model.gguf_tokenizer import tokenizer_of
from services.settings.gguf_directory import gguf_directory
from services.settings.named_models import gguf_of
from services.values.errors import ConfigError

pytestmark = pytest.mark.long

SIZES = dict(
    vocab_size=len(TOKENS),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.5,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True)
STRETCHED = dict(
    rope_type="llama3",
    rope_theta=100_000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def made(model_class, config):
    torch.manual_seed(3)
    model = model_class(config).eval()
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            each.data.normal_()
    return model


def llama(tied, **changes):
    return made(LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=tied, **changes))


def factors_of(model):
    """A plain rotation's frequencies are divided by these; llama.cpp keeps those of a stretched one."""
    plain = 1 / 100_000.0 ** (torch.arange(0, 8, 2) / 8)
    factors = (plain / model.model.rotary_emb.inv_freq).float()
    return {"rope_freqs.weight": ((4,), F32_TENSOR, factors.numpy().tobytes())}


def same_logits(directory, model, dtype=torch.float32):
    ids = torch.randint(0, len(TOKENS), (2, 40), generator=torch.Generator().manual_seed(1))
    again = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert again.dtype == dtype
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model(ids).logits)
    return again


def converted(tmp_path, model, **written):
    file, directory = tmp_path / "model.gguf", tmp_path / "checkpoint"
    directory.mkdir()
    write_llama(file, model, **written)
    write_checkpoint(file, directory, lambda *told: None, {"temperature": 0.2})
    return directory


def test_it_computes_what_the_model_did(subtests, tmp_path_factory):
    for tied in [True, False]:
        with subtests.test(tied=tied):
            tmp_path = tmp_path_factory.mktemp("case")
            model = llama(tied)
            directory = converted(tmp_path, model)
            assert same_logits(directory, model).config.tie_word_embeddings == tied
            generation = json.loads((directory / "generation_config.json").read_text())
            assert generation["eos_token_id"] == 2 and generation["temperature"] == 0.2


def test_other_families_are_read(subtests, tmp_path_factory):
    for family, model in [
        ("llama", llama(False, attention_bias=True)),
        ("llama", llama(False, head_dim=16)),
        ("qwen2", made(Qwen2ForCausalLM, Qwen2Config(**SIZES))),
        ("qwen3", made(Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16))),
        ("qwen3moe", made(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8))),
    ]:
        with subtests.test(family):
            same_logits(converted(tmp_path_factory.mktemp("case"), model, family=family), model)
    with subtests.test("frequencies that Llama 3 stretches"):
        model = llama(True, rope_parameters=STRETCHED)
        directory = converted(tmp_path_factory.mktemp("case"), model, extra=factors_of(model))
        again = same_logits(directory, model)
        assert again.config.rope_parameters["factor"] == 8
        ends = {"eos_token_id": 2}
        assert json.loads((directory / "generation_config.json").read_text()).items() >= ends.items()


def test_a_file_is_served_from_a_directory_of_ours(tmp_path, monkeypatch):
    """It is served without a copy of its weights, which are rounded once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = llama(True)
    file = tmp_path / "some.gguf"
    write_llama(file, model)
    directory = gguf_directory(file)
    assert gguf_of(file) == file and gguf_of(directory) is None
    assert directory.parent == tmp_path / "cache" / "isthmus" / "gguf"
    assert directory == gguf_directory(file)
    opened = open_checkpoint(directory)
    assert opened.dtype == torch.bfloat16
    loaded = load_model(opened, torch.device("cpu")).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor.bfloat16()), name
    same = load_model(open_checkpoint(directory, "float32"), torch.device("cpu")).state_dict()
    assert all(torch.equal(same[name], tensor) for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(directory).eos_token_id == 2
    check_checkpoint("torch", directory)
    with pytest.raises(ConfigError, match="engine torch alone"):
        check_checkpoint("sglang", directory)
    other = tmp_path / "elsewhere"
    shutil.copytree(directory, other, symlinks=True)
    assert open_checkpoint(other).fingerprint == opened.fingerprint
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    write_llama(file, model)  # Another file of that name is another model.
    assert gguf_directory(file) != directory
    assert open_checkpoint(gguf_directory(file)).fingerprint != opened.fingerprint
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be prepared"):
        gguf_directory(file)


def test_a_tensor_that_the_model_leaves_out_is_refused(subtests, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = llama(True)
    a_vector = ((32,), F32_TENSOR, bytes(128))
    fewer = with_entry("llama.block_count", U32, 1)
    for i, (entries, extra, name) in enumerate(
        [
            (None, {"blk.0.ffn_down.bias": a_vector}, "layers.0.mlp.down_proj.bias"),
            (None, {"blk.0.attn_norm.bias": a_vector}, "layers.0.input_layernorm.bias"),
            (None, {"blk.1.attn_q.bias": a_vector}, "layers.1.self_attn.q_proj.bias"),
            (fewer, {}, "layers.1.input_layernorm.weight"),
        ]
    ):
        with subtests.test(name):
            file = tmp_path / f"{i}.gguf"
            write_llama(file, model, entries=entries, extra=extra)
            checkpoint = open_checkpoint(gguf_directory(file))
            with pytest.raises(ConfigError, match=f"no place in LlamaForCausalLM: .*{name}"):
                load_model(checkpoint, torch.device("cpu"))


def test_a_gguf_file_beside_safetensors_is_not_served(tmp_path):
    model = llama(True)
    directory = converted(tmp_path, model)
    alone = open_checkpoint(directory).fingerprint
    (directory / "model.gguf").write_bytes(b"GGUF of another model")
    opened = open_checkpoint(directory)
    assert not opened.is_quantized and opened.fingerprint == alone
    check_checkpoint("sglang", directory)


def test_its_tokenizer(subtests, tmp_path_factory):
    with subtests.test("its tokenizer splits digits and keeps what is special"):
        tmp_path = tmp_path_factory.mktemp("case")
        tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path, llama(tied=True)))
        assert tokenizer.tokenize(" 12 the") == ["Ġ", "1", "2", "Ġthe"]
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Grüße\n"}], tokenize=False)
        ids = tokenizer(text).input_ids
        assert (ids[0], ids.count(2), tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 1, 2, 2)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nGrüße\n\nassistant"
        assert tokenizer.model_max_length == 128
    for pre, expected in [
        ("llama-bpe", [["Ġ", "12"], ["a", "1", "b"], ["I", "'", "m"], ["Ġthe"]]),
        ("qwen2", [["Ġ", "1", "2"], ["a", "1", "b"], ["I", "'", "m"], ["Ġthe"]]),
    ]:
        with subtests.test("words are split as Llama 3 and Qwen do", pre=pre):
            model = llama(tied=True)
            entries = llama_entries(model.config, pre=pre)
            entries.append(("tokenizer.ggml.eot_token_id", U32, 0))
            directory = converted(tmp_path_factory.mktemp("case"), model, entries=entries)
            tokenizer = AutoTokenizer.from_pretrained(directory)
            assert [tokenizer.tokenize(text) for text in (" 12", "a1b", "I'm", " the")] == expected
            generation = json.loads((directory / "generation_config.json").read_text())
            assert generation["eos_token_id"] == [2, 0]
    with subtests.test("a tokenizer of gpt 2 has no splitting of digits"):
        tmp_path = tmp_path_factory.mktemp("case")
        model = llama(tied=True)
        directory = converted(tmp_path, model, entries=llama_entries(model.config, pre="gpt-2"))
        assert AutoTokenizer.from_pretrained(directory).tokenize(" 12 the") == ["Ġ1", "2", "Ġthe"]
    for pre, names_bos, expected in [
        ("llama-bpe", True, [1]),
        ("llama-bpe", False, []),
        ("smollm", True, []),
    ]:
        with subtests.test("a first token is added unasked", pre=pre, names_bos=names_bos):
            left_out = ["add_bos_token"] if names_bos else ["add_bos_token", "bos_token_id"]
            entries = [
                each
                for each in llama_entries(llama(tied=True).config, pre=pre)
                if each[0].removeprefix("tokenizer.ggml.") not in left_out
            ]
            tokenizer = tokenizer_of(read_gguf(gguf_bytes(entries, {})).metadata)
            assert tokenizer.encode("the").ids[:-2] == expected


def with_entry(key, kind, value):
    return [(key, kind, value), *(e for e in llama_entries(llama(True).config) if e[0] != key)]


def test_what_is_stated_and_changes_nothing_is_read(tmp_path):
    model = llama(True)
    stated = [
        ("llama.rope.scaling.type", TEXT, "linear"),
        ("llama.rope.scaling.factor", F32, 1.0),
        ("llama.attention.causal", BOOL, True),
        ("llama.attention.value_length", U32, 8),
        ("llama.logit_scale", F32, 1.0),
    ]
    same_logits(converted(tmp_path, model, entries=[*llama_entries(model.config), *stated]), model)


def test_what_would_be_converted_wrongly_is_refused(subtests, tmp_path_factory):
    for entry, why in [
        (("general.architecture", TEXT, "gemma3"), "family 'gemma3'; read are llama, qwen2"),
        (("llama.attention.sliding_window", U32, 64), "windows"),
        (("llama.expert_count", U32, 8), "experts"),
        (("llama.rope.scaling.type", TEXT, "yarn"), r"scales its rotation \(yarn\)"),
        (("llama.rope.scaling.factor", F32, 4.0), r"scales its rotation \(by 4.0\)"),
        (("llama.rope.scale_linear", F32, 4.0), r"scales its rotation \(by 4.0\)"),
        (("llama.rope.scaling.attn_factor", F32, 2.0), "attn_factor=2.0, which"),
        (("llama.rope.freq_base", F32, 0.0), "rope.freq_base is 0"),
        (("llama.rope.dimension_count", U32, 4), "a part of each head"),
        (("llama.attention.causal", BOOL, False), "both directions"),
        (("llama.attention.value_length", U32, 4), "values of another length"),
        (("llama.attention.scale", F32, 0.5), "attention.scale=0.5, which"),
        (("llama.attention.clamp_kqv", F32, 8.0), "clamp_kqv=8.0, which"),
        (("llama.attn_logit_softcapping", F32, 5.0), "softcapping=5.0, which"),
        (("llama.logit_scale", F32, 0.5), "logit_scale=0.5, which"),
        (("llama.attention.head_count", U32, 0), "no heads"),
        (("llama.block_count", TEXT, "two"), "llama.block_count is 'two'"),
        (("tokenizer.ggml.model", TEXT, "llama"), "kind 'llama'; only gpt2"),
        (("tokenizer.ggml.pre", TEXT, "tekken"), "splits texts as 'tekken'"),
        (("tokenizer.ggml.eos_token_id", U32, 9999), "eos_token_id is none of its"),
    ]:
        with subtests.test("what would be converted wrongly is refused", entry=entry, why=why):
            tmp_path = tmp_path_factory.mktemp("case")
            with pytest.raises(ConfigError, match=why):
                converted(tmp_path, llama(True), entries=with_entry(*entry))
    for entries, why in [
        ([("tokenizer.ggml.bos_token_id", TEXT, "x")], "bos_token_id is none of its"),
        ([("tokenizer.ggml.bos_token_id", ARRAY, [], U32)], "bos_token_id is none of its"),
        ([("tokenizer.ggml.tokens", U32, 3)], "tokens is no list of texts"),
        ([("tokenizer.ggml.tokens", ARRAY, [3], U32)], "tokens is no list of texts"),
        ([("tokenizer.ggml.tokens", ARRAY, [*TOKENS[1:], TOKENS[1]], TEXT)], "stands twice"),
        ([("tokenizer.ggml.token_type", U32, 3)], "token_type is no list of whole numbers"),
        ([("tokenizer.ggml.merges", ARRAY, [3], U32)], "merges is no list of texts"),
        ([("tokenizer.chat_template", U32, 3)], "chat_template is no text"),
        ([("tokenizer.ggml.add_bos_token", TEXT, "no")], "add_bos_token is 'no', not true or false"),
        ([("llama.attention.head_count", F32, float("nan"))], "head_count is nan, not a whole number"),
        ([("llama.attention.layer_norm_rms_epsilon", F32, float("inf"))], "epsilon is inf, not a number"),
        (
            [
                ("llama.attention.head_count", U32, 32),
                ("llama.attention.key_length", U32, 1),
                ("llama.rope.dimension_count", U32, 1),
            ],
            "of 32 heads",
        ),
    ]:
        with subtests.test("metadata of another type is refused by name", entries=entries, why=why):
            tmp_path = tmp_path_factory.mktemp("case")
            replaced = {each[0]: each for each in [*llama_entries(llama(True).config), *entries]}
            with pytest.raises(ConfigError, match=why):
                converted(tmp_path, llama(True), entries=[*replaced.values()])
    with subtests.test("a bos token that is added and not named is refused"):
        tmp_path = tmp_path_factory.mktemp("case")
        entries = [
            e for e in with_entry("tokenizer.ggml.add_bos_token", BOOL, True) if "bos_token_id" not in e[0]
        ]
        with pytest.raises(ConfigError, match="adds a bos token and names none"):
            converted(tmp_path, llama(True), entries=entries)
    with subtests.test("a tensor that has no place is refused"):
        tmp_path = tmp_path_factory.mktemp("case")
        extra = {"blk.0.ffn_other.weight": ((4,), F32_TENSOR, bytes(16))}
        with pytest.raises(ConfigError, match=r"blk\.0\.ffn_other\.weight, which cannot be converted"):
            converted(tmp_path, llama(True), extra=extra)
        for factors in ([], [0, 0, 0, 0], [1, 1, 2, 8], [8, 8]):
            content = struct.pack(f"<{len(factors)}f", *factors)
            extra = {"rope_freqs.weight": ((len(factors),), F32_TENSOR, content)}
            with pytest.raises(ConfigError, match="otherwise than Llama 3 does"):
                converted(tmp_path_factory.mktemp("case"), llama(True), extra=extra)
        file = tmp_path / "short.gguf"
        file.write_bytes(
            gguf_bytes(llama_entries(llama(True).config), {"token_embd.weight": ((3, 32), 0, bytes(384))})
        )
        with pytest.raises(ConfigError, match="another length than its tokens"):
            write_checkpoint(file, tmp_path, lambda *told: None)
