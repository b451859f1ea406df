"""A GGUF as llama.cpp would write it of a transformers model becomes that model again."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

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
from services.cli.model.gguf_checkpoint import write_checkpoint
from services.values.errors import ConfigError


def llama(tied):
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.5,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config).eval()


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
            ids = torch.randint(0, len(TOKENS), (2, 40), generator=torch.Generator().manual_seed(1))
            again = AutoModelForCausalLM.from_pretrained(directory).eval()
            with torch.inference_mode():
                assert torch.equal(again(ids).logits, model(ids).logits)
            assert again.config.tie_word_embeddings == tied
            assert again.dtype == torch.float32
            generation = json.loads((directory / "generation_config.json").read_text())
            assert generation["eos_token_id"] == 2 and generation["temperature"] == 0.2


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
    with subtests.test("a tokenizer of gpt 2 has no splitting of digits"):
        tmp_path = tmp_path_factory.mktemp("case")
        model = llama(tied=True)
        directory = converted(tmp_path, model, entries=llama_entries(model.config, pre="gpt-2"))
        assert AutoTokenizer.from_pretrained(directory).tokenize(" 12 the") == ["Ġ1", "2", "Ġthe"]


def with_entry(key, kind, value):
    return [(key, kind, value), *(e for e in llama_entries(llama(True).config) if e[0] != key)]


def test_what_would_be_converted_wrongly_is_refused(subtests, tmp_path_factory):
    for entry, why in [
        (("general.architecture", TEXT, "qwen2"), "family 'qwen2'; only llama"),
        (("llama.expert_count", U32, 8), "experts"),
        (("llama.rope.scaling.type", TEXT, "yarn"), r"scales its rotation \(yarn\)"),
        (("llama.rope.dimension_count", U32, 4), "a part of each head"),
        (("llama.attention.head_count", U32, 0), "no heads"),
        (("llama.block_count", TEXT, "two"), "llama.block_count is 'two'"),
        (("tokenizer.ggml.model", TEXT, "llama"), "kind 'llama'; only gpt2"),
        (("tokenizer.ggml.pre", TEXT, "llama-bpe"), "splits texts as 'llama-bpe'"),
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
        ([("llama.attention.head_count", F32, float("nan"))], "head_count is nan, not a whole number"),
        ([("llama.attention.layer_norm_rms_epsilon", F32, float("inf"))], "epsilon is inf, not a number"),
        ([("llama.attention.head_count", U32, 32), ("llama.rope.dimension_count", U32, 1)], "of 32 heads"),
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
        factors = {"rope_freqs.weight": ((4,), F32_TENSOR, bytes(16))}
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight, which cannot be converted"):
            converted(tmp_path, llama(True), extra=factors)
        file = tmp_path / "short.gguf"
        file.write_bytes(
            gguf_bytes(llama_entries(llama(True).config), {"token_embd.weight": ((3, 32), 0, bytes(384))})
        )
        with pytest.raises(ConfigError, match="another length than its tokens"):
            write_checkpoint(file, tmp_path, lambda *told: None)
