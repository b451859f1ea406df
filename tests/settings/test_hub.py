"""Checkpoints by their names on the hub, from a cache laid out as the hub's library does; no network."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from model.gguf_files import gguf_bytes, llama_entries
from services.settings import named_models
from services.settings.named_models import HubName, hub_name, resolved
from services.values.errors import ConfigError, Unavailable

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WHOLE = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}
GGUF_SIZES = dict(
    num_hidden_layers=1,
    max_position_embeddings=64,
    hidden_size=16,
    intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
)
INDEX = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})


@dataclass(frozen=True)
class Config:
    model: str
    model_name: str = ""
    draft_model: str = ""


@dataclass(frozen=True)
class Sizes:
    model: Path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """`cache(files, revision)` puts org/name there; the hub itself is nowhere."""
    folder = tmp_path / "models--org--name"

    def put(files, revision="main"):
        snapshot = folder / "snapshots" / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(COMMIT)
        for name, text in files.items():
            (snapshot / name).write_text(text)
        return str(snapshot)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    return put


def test_a_name_is_told_from_a_path(subtests):
    for text, name in [
        ("org/name", HubName("org/name", None)),
        ("Qwen/Qwen3-0.6B@main", HubName("Qwen/Qwen3-0.6B", "main")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        *((path, None) for path in ("/org/name", "./name", "../name", "name", "a/b/c", "~/name", "org/", "")),
    ]:
        with subtests.test(text=text, name=name):
            assert hub_name(text) == name


def test_a_directory_of_that_name_comes_first(cache, tmp_path):
    cache(WHOLE)
    (tmp_path / "org" / "name").mkdir(parents=True)
    config = Config("org/name")
    assert resolved(config, weights=True) is config


def test_what_is_cached_needs_no_network(cache):
    directory = cache(WHOLE)
    assert resolved(Config("org/name"), weights=True) == Config(directory, "org/name")
    assert resolved(Config("org/name@main", "mine"), weights=True) == Config(directory, "mine")
    assert resolved(Config("org/name", draft_model="org/name"), weights=True).draft_model == directory
    assert resolved(Sizes(Path("org/name")), weights=False) == Sizes(Path(directory))


def test_a_revision_is_another_snapshot(cache):
    directory = cache(WHOLE, "v2")
    assert resolved(Config("org/name@v2"), weights=True).model == directory
    with pytest.raises(Unavailable, match="there is no directory org/name here"):
        resolved(Config("org/name"), weights=True)


def test_half_a_download_is_enough_for_who_needs_no_weights(subtests, cache, monkeypatch):
    for files in [{"config.json": "{}"}, {**WHOLE, named_models.INDEX: INDEX, "one.safetensors": ""}]:
        with subtests.test(files=files), monkeypatch.context() as patch:
            directory = cache(files)
            assert resolved(Config("org/name"), weights=False).model == directory
            patch.setattr(constants, "HF_HUB_OFFLINE", True)
            with pytest.raises(
                ConfigError, match=r"--model: org/name is in the cache in part only .* HF_HUB_OFFLINE is set"
            ):
                resolved(Config("org/name"), weights=True)


def test_what_is_nowhere_is_told(cache, monkeypatch):
    told = []
    nowhere = "--draft-model: there is no directory org/name here, it is not in the Hugging Face cache"
    with pytest.raises(Unavailable, match=f"{nowhere}.*the hub cannot be reached: .*refused"):
        resolved(Config("/m", draft_model="org/name"), weights=True, report=told.append)
    assert len(told) == 1 and told[0].startswith("downloading org/name from the Hugging Face hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"{nowhere}.*HF_HUB_OFFLINE is set"):
        resolved(Config("/m", draft_model="org/name"), weights=True)


def test_what_the_hub_would_not_take_is_told_of_as_a_path(subtests, cache):
    for path in ["models/my--model", "models/a..b", "out/tiny.git", "out-/tiny", "o/" + "n" * 120]:
        with subtests.test(path=path), pytest.raises(ConfigError, match="--model: there is no directory"):
            resolved(Config(path), weights=True)


def test_a_gguf_file_is_served_from_a_directory_under_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = tmp_path / "own"
    own.mkdir()
    entries = {each[0]: each for each in llama_entries(SimpleNamespace(**GGUF_SIZES))}
    file = own / "Tiny-Q8_0.gguf"
    file.write_bytes(gguf_bytes([*entries.values()], {}))
    for text in (str(file), str(own)):
        found = resolved(Config(text, draft_model=text), weights=True)
        assert found.model == found.draft_model != text
        assert found.model_name == "Tiny-Q8_0"
        assert {path.name for path in Path(found.model).iterdir()} >= {"config.json", "model.gguf"}
    assert resolved(Config(str(file), "mine"), weights=False).model_name == "mine"
    (own / "other.gguf").write_bytes(b"GGUF")
    config = Config(str(own))
    with pytest.raises(ConfigError, match=r"--model: .*own has 2 GGUF files; name one"):
        resolved(config, weights=True)
    (tmp_path / "no.gguf").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"no\.gguf is no GGUF file: it does not begin with GGUF"):
        resolved(Config(str(tmp_path / "no.gguf")), weights=True)
    with pytest.raises(ConfigError, match=r"--model: .*other\.gguf: the GGUF file is cut short"):
        resolved(Config(str(own / "other.gguf")), weights=True)
    (own / "config.json").write_text("{}")
    (own / "other.gguf").unlink()  # A checkpoint that has one beside it is one.
    assert resolved(config, weights=True) is config
