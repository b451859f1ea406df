"""Text and a tokenizer to measure with: byte-level BPE, trained on the standard library's sources."""

import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.router.sizes import VOCAB_SIZE

_CORPUS_CHARS = 3_000_000
_END = "<|end|>"


@dataclass(frozen=True, slots=True)
class Corpus:
    text: str
    begins: list[int]  # of each of its tokens, in characters

    def piece(self, rng: random.Random, num_tokens: int) -> str:
        """Return some text of about so many tokens."""
        first = rng.randrange(len(self.begins) - num_tokens)
        return self.text[self.begins[first] : self.begins[first + num_tokens]]


def make_checkpoint(directory: Path) -> Corpus:
    """Write what a router needs of a model; nothing computes with it."""
    text = _sources()
    tokenizer = _trained(text)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)
    fast.save_pretrained(directory)
    config = {"vocab_size": VOCAB_SIZE, "eos_token_id": tokenizer.token_to_id(_END)}
    (directory / "config.json").write_text(json.dumps(config))
    return Corpus(text, [begin for begin, _ in tokenizer.encode(text).offsets])


def _sources() -> str:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "".join(file.read_text(encoding="utf-8") for file in files)[:_CORPUS_CHARS]


def _trained(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, special_tokens=[_END], show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer
