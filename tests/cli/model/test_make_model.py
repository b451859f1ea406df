import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.families import FAMILIES
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import random_prompt, reference_generations
from services.cli.model.chat_templates import EOS
from services.cli.model.make_model import ARCHITECTURES, EOS_ID, UNKNOWN_ID, make_model, run
from services.values.errors import ConfigError

pytestmark = pytest.mark.long


@pytest.fixture
def characters():
    return AutoTokenizer.from_pretrained(tiny_checkpoint(), local_files_only=True)


@pytest.fixture
def byte_tokens():
    return AutoTokenizer.from_pretrained(tiny_checkpoint(tokenizer="bytes"), local_files_only=True)


def test_every_prompt_token_counts(subtests):
    for architecture in ARCHITECTURES:
        with subtests.test(architecture=architecture):
            prompt = random_prompt(200, seed=1)
            variants = []
            for n in range(32):
                position = n * 199 // 31
                changed = 4 + (prompt[position] - 4 + 1 + 15 * n) % 508
                assert changed != prompt[position]
                variants.append((*prompt[:position], changed, *prompt[position + 1 :]))
            expected, *others = reference_generations(tiny_checkpoint(architecture), [prompt, *variants], 32)
            unnoticed = [n for n, other in enumerate(others) if other.token_ids == expected.token_ids]
            assert unnoticed == []
            for generated in (expected, *others):
                assert len(set(generated.token_ids)) >= 16  # no loops
                assert EOS_ID not in generated.token_ids
            gaps = sorted(gap for generated in (expected, *others) for gap in generated.gaps)
            assert gaps[len(gaps) // 100] > 1e-3  # near ties are rare


def test_tokenizers(subtests, characters, byte_tokens):
    with subtests.test("characters are ids and ids are characters"):
        ids = torch.randint(0, 512, (3000,), generator=torch.Generator().manual_seed(0)).tolist()
        text = characters.decode(ids)
        assert len(text) == len(ids)
        assert text.isprintable()
        assert characters.encode(text) == ids
        sentence = "  Two  spaces, 'quotes' and é ß ž. "
        assert characters.decode(characters.encode(sentence)) == sentence
        assert len({characters.decode([i]) for i in range(512)}) == 512
    with subtests.test("characters outside the vocabulary are the unknown one"):
        assert characters.encode("日\n") == [UNKNOWN_ID, UNKNOWN_ID]
        assert characters.encode(characters.decode([UNKNOWN_ID])) == [UNKNOWN_ID]
        assert characters.eos_token_id == EOS_ID
        assert characters.all_special_ids == [EOS_ID]
    with subtests.test("bytes hold any text and split characters"):
        text = "é 日本\n\t🙂  x"
        ids = byte_tokens.encode(text)
        assert len(ids) == len(text.encode())
        assert byte_tokens.decode(ids) == text
        assert len(byte_tokens) == 259


def test_chat_templates(subtests, request, characters, tmp_path, capsys):
    for name in ["characters", "byte_tokens"]:
        with subtests.test("the chat template extends what came before", name=name):
            tokenizer = request.getfixturevalue(name)

            def ids(messages, add_generation_prompt, tokenizer=tokenizer):
                return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)[
                    "input_ids"
                ]

            conversation = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
            prompt = ids(conversation, True)
            assert UNKNOWN_ID not in prompt or name == "byte_tokens"
            assert "".join(tokenizer.decode(prompt)) == "⟦system:Be.⟧⟦user:Hi⟧⟦assistant:"
            answer = [{"role": "assistant", "content": "Yo"}, {"role": "tool", "content": "1"}]
            assert ids(conversation + answer, True)[: len(prompt)] == prompt
            assert tokenizer.decode(ids(conversation + answer, False)).endswith("⟦assistant:Yo⟧⟦tool:1⟧")
    with subtests.test("an unknown role is refused"), pytest.raises(Exception, match="unknown role robot"):
        characters.apply_chat_template([{"role": "robot", "content": "x"}])
    with subtests.test("a template with tools shows calls and results"):
        assert run([str(tmp_path / "m"), "--tokenizer=bytes", "--chat-template=thinking"]) == 0
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m", local_files_only=True)
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "ß"}}}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call, call]},
            {"role": "tool", "content": "7", "tool_call_id": "c"},
        ]
        tools = [{"type": "function", "function": {"name": "f", "description": "does"}}]
        asked = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        written = '<tool_call>\n{"name": "f", "arguments": {"a": "ß"}}\n</tool_call>'
        assert (
            f"assistant:<think>\nhm\n</think>\n\n{written}\n{written}⟧⟦tool:7⟧⟦assistant:<think>\n" in asked
        )
        assert '{"name": "f", "description": "does"}' in asked
        quick = tokenizer.apply_chat_template(
            messages, enable_thinking=False, tokenize=False, add_generation_prompt=True
        )
        assert quick.endswith("⟦assistant:<think>\n\n</think>\n\n") and "system:" not in quick
        assert len(tokenizer.encode("<tool_call></think>")) == 2


def modes(directory):
    """The weights can be read by whoever can read the tokenizer, since pods have a user of their own."""
    return {file.stat().st_mode for file in directory.iterdir()}


def test_what_is_made_and_what_is_refused(subtests, tmp_path_factory, capsys):
    with subtests.test("a seed is a model and leaves torchs own chance alone"):
        tmp_path = tmp_path_factory.mktemp("case")
        torch.manual_seed(1)
        before = torch.random.get_rng_state()
        make_model(tmp_path, seed=0)
        assert torch.equal(before, torch.random.get_rng_state())
        mine, same, other = (
            load_file(d / "model.safetensors") for d in (tmp_path, tiny_checkpoint(), tiny_checkpoint(seed=1))
        )
        assert all(torch.equal(mine[name], same[name]) for name in mine)
        assert not torch.equal(mine["lm_head.weight"], other["lm_head.weight"])
        assert not torch.equal(mine["lm_head.weight"], mine["model.embed_tokens.weight"])
        assert len(modes(tmp_path)) == 1
    with subtests.test("the command makes the model it is asked for"):
        tmp_path = tmp_path_factory.mktemp("case")
        sizes = "--hidden-size=32 --num-layers=3 --num-heads=2 --num-kv-heads=1 --vocab-size=200"
        assert run([str(tmp_path), "--architecture=qwen3", *sizes.split()]) == 0
        assert str(tmp_path) in capsys.readouterr().out
        config = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
        assert config.architectures == ["Qwen3ForCausalLM"]
        assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (32, 3, 16)
        assert (config.num_key_value_heads, config.vocab_size) == (1, 200)
    for settings in [
        {"architecture": "gpt2"},
        {"tokenizer": "words"},
        {"hidden_size": 60, "num_heads": 8},
        {"num_heads": 4, "num_kv_heads": 3},
        {"vocab_size": 64},
        {"tokenizer": "bytes", "vocab_size": 512},
        {"initializer_range": 0.02},
        {"chat_template": "tools"},
        {"num_layers": 0},
    ]:
        with subtests.test("sizes that do not fit are refused and nothing is written", settings=settings):
            tmp_path = tmp_path_factory.mktemp("case")
            with pytest.raises(ConfigError):
                make_model(tmp_path / "model", **settings)
            assert not (tmp_path / "model").exists()
    with subtests.test("what lies in a directory already is not written over"):
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "model.safetensors").write_text("somebody's")
        sizes = ["--hidden-size=32", "--num-heads=2"]
        with pytest.raises(ConfigError, match=r"is not empty \(model.safetensors\); --overwrite"):
            run([str(tmp_path), *sizes])
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        assert (tmp_path / "model.safetensors").read_text() == "somebody's"
        assert run([str(tmp_path), *sizes, "--overwrite"]) == 0
        assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")


PROMPTS = ["Is it warm in Corinth today?", "⟦user:Hello⟧⟦assistant:", '{"a": [1, 2], "b": "cc']


def test_dense_models_with_tools_like_what_ends_things(subtests, tmp_path_factory):
    for architecture in ARCHITECTURES:
        with subtests.test("a model with tools likes what ends things", architecture=architecture):
            tmp_path = tmp_path_factory.mktemp("case")
            make_model(tmp_path, architecture, tokenizer="bytes", chat_template="thinking")
            tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
            logits = []
            for prompt in PROMPTS:
                ids = torch.tensor([tokenizer.encode(prompt)])
                with torch.no_grad():
                    logits.append(model(ids).logits[0])
            found = torch.cat(logits)  # [tokens, ids]
            mean, spread = found.mean(0), float(found.std())
            assert 2 < spread < 5
            for token, liking in {'"': 7.0, "}": 3.0, "]": 3.0, "</think>": 6.0}.items():
                assert float(mean[tokenizer.convert_tokens_to_ids(token)]) == pytest.approx(liking, abs=2.5)
            ends = found[:, tokenizer.convert_tokens_to_ids(EOS)]
            assert float(ends.mean()) == pytest.approx(5.0, abs=1.5) and float(ends.std()) < 1.5
            assert int((found.argmax(1) != tokenizer.convert_tokens_to_ids('"')).sum()) > len(found) // 3
    with subtests.test("only dense models are steered"):
        tmp_path = tmp_path_factory.mktemp("case")
        with pytest.raises(ConfigError, match="tools"):
            make_model(tmp_path / "m", FAMILIES["qwen3_moe"], tokenizer="bytes", chat_template="tools")


def agreement(small, grown):
    """Of greedy tokens."""
    same = total = 0
    for seed in range(3):
        ids = torch.tensor([random_prompt(40, seed=seed)])
        with torch.inference_mode():
            ids = grown.generate(ids, max_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0)
            theirs, ours = (model(ids).logits[0, 39:-1].argmax(-1) for model in (small, grown))
        same, total = same + int((theirs == ours).sum()), total + len(ours)
    return same / total


def test_a_model_that_grows_keeps_four_of_five_tokens(subtests, tmp_path, capsys, tmp_path_factory):
    with subtests.test("four of five tokens stay"):
        source = tiny_checkpoint()
        settings = ["--extra-layers=3", "--extra-gain=2", "--seed=1"]
        assert run([str(tmp_path), f"--grown-from={source}", *settings]) == 0
        assert f"what {source} can draft for" in capsys.readouterr().out
        small, grown = (AutoModelForCausalLM.from_pretrained(path) for path in (source, tmp_path))
        assert grown.config.num_hidden_layers == small.config.num_hidden_layers + 3
        own, others = (AutoTokenizer.from_pretrained(path).get_vocab() for path in (source, tmp_path))
        assert own == others
        assert 0.7 < agreement(small, grown) < 0.95
        assert len(modes(tmp_path)) == 1
    with subtests.test("what is no checkpoint does not grow"):
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "source").mkdir()
        with pytest.raises(ConfigError, match="cannot grow"):
            run([str(tmp_path / "grown"), f"--grown-from={tmp_path / 'source'}"])
    with subtests.test("a family of other layers does not grow"):
        tmp_path = tmp_path_factory.mktemp("case")
        with pytest.raises(ConfigError, match="cannot grow"):
            run([str(tmp_path / "grown"), f"--grown-from={tiny_checkpoint('falcon_h1')}"])
