import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.conftest import byte_backend, save_tokenizer
from services.router.text.chat_turns import ChatTurns, Turn
from services.router.text.detokenizer import detokenizer_of
from services.router.text.tokenizer import Tokenizer
from services.values.errors import ConfigError, InvalidRequest


def test_ids_are_those_of_transformers_and_text_comes_back_from_them(
    character_tokenizer: Tokenizer, byte_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer
) -> None:
    text = "Hello, 語 👋\n"
    for tokenizer in (character_tokenizer, byte_tokenizer):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert byte_tokenizer.encode("é👋") == list("é👋".encode())

    for tokenizer in (character_tokenizer, byte_tokenizer, sentencepiece_tokenizer):
        for text in ("", "a b", "<|user|>Hi 👋<|end|>\n <|assistant|>", "x" * 3000):
            for special in (True, False):
                ids = tokenizer._backend(text, add_special_tokens=special).input_ids
                assert tokenizer.encode(text, special) == ids


_WITHOUT_TORCH = """
import sys
from services.router import __main__
assert not {"torch", "transformers"} & set(sys.modules)
__main__._do_without_torch()
from services.router.text.tokenizer import Tokenizer
print(Tokenizer(sys.argv[1]).encode("Hi"))
assert sys.modules["torch"] is None
"""


@pytest.mark.long
def test_a_routers_process_has_no_torch(character_model: Path, character_tokenizer: Tokenizer) -> None:
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(character_model)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stderr) == (0, "")
    assert json.loads(run.stdout) == character_tokenizer.encode("Hi")


def test_a_byte_level_file_under_a_class_of_sentencepiece_keeps_its_text(tmp_path: Path) -> None:
    """transformers 5.12 to 5.21 read such a file with LlamaTokenizer's own pipeline."""
    save_tokenizer(tmp_path, byte_backend())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"tokenizer_class": "LlamaTokenizer"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = Tokenizer(str(tmp_path))
    text = "Hello  world,\n日本語 👋"
    ids = tokenizer.encode(text, special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    stream = detokenizer_of(tokenizer)
    assert "".join(stream.push([token_id]) for token_id in ids) + stream.finish() == text
    assert tokenizer.render_template([Turn("user", "Hi")]) == "<|user|>Hi<|end|>\n<|assistant|>"


def test_eos_ids_and_vocab_size_are_the_files_and_else_the_tokenizers_own(
    character_model: Path, tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    for file in character_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    [end] = Tokenizer(str(tmp_path)).encode("<|end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 6]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 8, "vocab_size": 500}))
    tokenizer = Tokenizer(str(tmp_path))
    assert tokenizer.eos_token_ids == (7, 6, end)
    assert tokenizer.generation_config == {"eos_token_id": [7, 6]}
    assert tokenizer.vocab_size == 500

    assert byte_tokenizer.vocab_size == 256 + 5
    [end] = byte_tokenizer.encode("<|end|>")
    assert byte_tokenizer.eos_token_ids == (end,)


def test_a_stored_truncation_does_not_cut_prompts(character_model: Path, tmp_path: Path) -> None:
    for file in character_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = Tokenizer(str(tmp_path))
    # It is taken out at once: transformers would do it at the first call, and race with other threads.
    assert tokenizer._backend.backend_tokenizer.truncation is None
    assert len(tokenizer.encode("abcdefgh")) == 8


def test_what_cannot_be_loaded_is_said(
    tmp_path: Path, character_model: Path, subtests: pytest.Subtests
) -> None:
    with pytest.raises(ConfigError, match="there is no model directory"):
        Tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="has no tokenizer"):
        Tokenizer(str(tmp_path))

    for content in ["{", "[]", b"\xff"]:
        with subtests.test(content=content):
            for file in character_model.iterdir():
                (tmp_path / file.name).write_bytes(file.read_bytes())
            broken = tmp_path / "generation_config.json"
            broken.write_bytes(content if isinstance(content, bytes) else content.encode())
            with pytest.raises(ConfigError, match=r"generation_config\.json"):
                Tokenizer(str(tmp_path))


def test_a_developer_is_the_system_to_templates_that_know_none(
    character_model: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for known, role in [("{# developers #}", "system"), ("{% set roles = ['developer'] %}", "developer")]:
        with subtests.test(known=known, role=role):
            for file in character_model.iterdir():
                (tmp_path / file.name).write_bytes(file.read_bytes())
            template = tmp_path / "chat_template.jinja"
            template.write_text(known + template.read_text())
            tokenizer = Tokenizer(str(tmp_path))
            arranged = tokenizer.arranged(ChatTurns([Turn("developer", "Be brief"), Turn("user", "Hi")]))
            rendered = tokenizer.render_template(arranged.turns)
            assert rendered == f"<|{role}|>Be brief<|end|>\n<|user|>Hi<|end|>\n<|assistant|>"


def test_a_template_of_a_file_takes_the_place_of_the_models(
    character_model: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    tokenizer = Tokenizer(str(character_model), str(file))
    assert tokenizer.render_template([Turn("user", "Hi")]) == "user: Hi\n"
    assert tokenizer.chat_template == file.read_text()
    file.write_text("{{ raise_exception('not this chat') }}")
    with pytest.raises(InvalidRequest, match="not this chat"):
        Tokenizer(str(character_model), str(file)).render_template([Turn("user", "Hi")])

    for content, problem in [
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b" \n", "is empty"),
        (b"{{ a }}\n{% if %}", "is wrong in line 2: Expected an expression"),
    ]:
        with subtests.test(problem):
            file = tmp_path / "bad.jinja"
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(ConfigError, match=problem):
                Tokenizer(str(character_model), str(file))


def test_the_chat_template_renders_up_to_the_next_turn_or_the_request_is_invalid(
    character_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = character_tokenizer.render_template([Turn("user", "Hi")])
    assert rendered == "<|user|>Hi<|end|>\n<|assistant|>"

    with pytest.raises(InvalidRequest, match="no such talk"):
        character_tokenizer.render_template([Turn("user", "forbidden")])
    with pytest.raises(InvalidRequest, match="no chat template"):
        sentencepiece_tokenizer.render_template([Turn("user", "Hi")])

    # Arguments that are too deep here were read before, from a few calls less deep.
    def too_deep(turn: Turn) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(character_tokenizer, "_plain_turns", SimpleNamespace(of=too_deep))
    with pytest.raises(InvalidRequest, match="maximum recursion depth exceeded"):
        character_tokenizer.render_template([Turn("user", "Hi")])


def test_what_a_token_stands_for(byte_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer) -> None:
    [end] = byte_tokenizer.encode("<|end|>")
    assert byte_tokenizer.is_silent(end)
    assert byte_tokenizer.is_silent(1_000_000)
    assert not byte_tokenizer.is_silent(65)
    first, second = "é".encode()
    assert byte_tokenizer.decode([first, end, 1_000_000, second]) == "é"

    [end] = byte_tokenizer.encode("<|end|>")
    assert byte_tokenizer.token_text(end) == "<|end|>"
    assert byte_tokenizer.token_text(0xE2) == "\ufffd"
    [word] = sentencepiece_tokenizer.encode("a")
    assert sentencepiece_tokenizer.decode([word]) == "a"
    assert sentencepiece_tokenizer.token_text(word) == " a"

    for tokenizer in (byte_tokenizer, sentencepiece_tokenizer):
        parts = tokenizer.encode("👋")[-4:]
        assert {tokenizer.token_text(part) for part in parts} == {"\ufffd"}
        assert b"".join(tokenizer.token_bytes(part) or b"" for part in parts) == "👋".encode()
        assert tokenizer.token_bytes(1_000_000) is None
