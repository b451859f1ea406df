import json

import pytest

from exactness.checkpoints import tiny_checkpoint
from grammar.written import ids_of_text, text_of
from router.conftest import byte_backend, sentencepiece_backend
from services.grammar.vocabulary import read_vocabulary
from services.values.errors import ConfigError


def test_pieces_of_every_kind_of_vocabulary(subtests, tmp_path_factory):
    for tokenizer in ["characters", "bytes"]:
        with subtests.test("the pieces of our own models", tokenizer=tokenizer):
            vocabulary = read_vocabulary(tiny_checkpoint(tokenizer=tokenizer), 600)
            text = '{"a b":[1,"ü"]}'
            assert text_of(vocabulary, ids_of_text(vocabulary, text)) == text
            assert len(vocabulary.pieces) == 600
            assert vocabulary.pieces[-1] == b""
            assert "␄".encode() in {vocabulary.pieces[token_id] for token_id in vocabulary.special}
    with subtests.test("byte level pieces"):
        directory = tmp_path_factory.mktemp("tokenizer")
        (directory / "tokenizer.json").write_text(byte_backend().to_str())
        assert read_vocabulary(directory, 256).pieces == tuple(bytes([byte]) for byte in range(256))
    with subtests.test("sentencepiece pieces"):
        directory = tmp_path_factory.mktemp("tokenizer")
        backend = sentencepiece_backend()
        backend.add_special_tokens(["<unk>", "</s>"])
        backend.add_tokens(["<think>"])
        (directory / "tokenizer.json").write_text(backend.to_str())
        size = backend.get_vocab_size()
        vocabulary = read_vocabulary(directory, size)
        named = {token: vocabulary.pieces[token_id] for token, token_id in backend.get_vocab().items()}
        assert named["▁a"] == b" a" and named["<0x0A>"] == b"\n" and named["z"] == b"z"
        assert named["<think>"] == b"<think>"
        assert vocabulary.special == {backend.token_to_id("<unk>"), backend.token_to_id("</s>")}


def test_special_tokens_and_directories_without_a_vocabulary(subtests, tmp_path_factory):
    with subtests.test("tokens that only tokenizer config declares special"):
        directory = tmp_path_factory.mktemp("tokenizer")
        backend = byte_backend()
        backend.add_tokens(["<a>", "<b>", "<c>", "<d>"])
        (directory / "tokenizer.json").write_text(backend.to_str())
        (directory / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "eos_token": {"content": "<a>"},
                    "additional_special_tokens": ["<b>"],
                    "added_tokens_decoder": {"258": {"content": "<c>", "special": True}},
                }
            )
        )
        assert read_vocabulary(directory, 260).special == {256, 257, 258}
    for text in [
        None,
        "{",
        "[]",
        '{"decoder": {"type": "WordPiece"}}',
        '{"added_tokens": [{}]}',
        '{"model": 3}',
    ]:
        with subtests.test("a directory without a vocabulary", text=text):
            directory = tmp_path_factory.mktemp("tokenizer")
            if text is not None:
                (directory / "tokenizer.json").write_text(text)
            with pytest.raises(ConfigError, match=r"tokenizer\.json"):
                read_vocabulary(directory, 10)
