"""This module makes a model's tokenizer do what its tokenizer.json says, whatever class its other files name.

transformers builds the class that tokenizer_config.json or the model's type names. Many of these classes take
only the vocabulary from tokenizer.json, and have their own rules for how text is split and how tokens become
text. So a byte-level file beside `"tokenizer_class": "LlamaTokenizer"` is read as if it were sentencepiece's,
and `"model_type": "qwen2"` splits any file's text as Qwen 2 does. Which classes do so differs from release to
release. Therefore we compare both on texts that distinguish them.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.observe import log_lines

log = logging.getLogger(__name__)

_PROBES = (
    "Hello world, how are you?",
    " a leading space, two  spaces, three   of them and one at the end ",
    'def f(x_1: int) -> str:\n    return f"{x_1 ** 2:>10}" if x_1 != 0 else ""\n\n\n\tpass\r\n  \n',
    "In 2024, 1234567 of 0.5 and 3,000.25; v1.2.3 0x7FFF 1e10 ½ ² ٣٤",
    "I'm sure they'LL say we'd've DON'T camelCase HTTPServer snake_case!!!\n\n?? ...",
    "日本語とカタカナ、한국어 그리고 中文。Ünïcödé naïve Straße ﬁ Å A\u030a",
    "Привет, мир! Γειά σου שלום مرحبا नमस्ते สวัสดี",
    "👋🏽 👩\u200d👩\u200d👧 \u00a0\u3000\u2028\u200b\ufeff x\u0000\u001b[0m\u007f",
    "▁ Ġ Ċ <0x0A> \ue000",
)


def tokenizer_of_file(loaded: Any, directory: Path) -> Any:
    """Return `loaded`, transformers' tokenizer of `directory`, or one that does what the file says.

    It is `loaded` if both treat the texts alike, if it does not use the `tokenizers` library, or if there is
    no such file. A replacement is logged.
    """
    # The import is not at the top, so that a caller can first make transformers load without torch.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    has_class = isinstance(loaded, PreTrainedTokenizerFast) and type(loaded) is not PreTrainedTokenizerFast
    if not has_class or not (directory / "tokenizer.json").is_file():
        return loaded
    # Its pipeline is the file's, plus the tokens that only tokenizer_config.json has.
    plain = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    difference = first_difference(loaded.backend_tokenizer, plain.backend_tokenizer)
    if difference is None:
        return loaded
    log_lines.event(
        log,
        "tokenizer_file_used",
        logging.WARNING,
        instead_of=type(loaded).__name__,
        otherwise=ascii(difference),
        effect="text is read and written as tokenizer.json says",
    )
    return plain


def first_difference(one: Any, other: Any) -> str | None:
    for text in _texts(other):
        ids = other.encode(text, add_special_tokens=False).ids
        if one.encode(text, add_special_tokens=False).ids != ids or _decoded(one, ids) != _decoded(
            other, ids
        ):
            return text
    return None


def _texts(tokenizer: Any) -> Iterator[str]:
    yield from _PROBES
    for token in tokenizer.get_added_tokens_decoder().values():
        yield f"a{token.content} b {token.content}\n{token.content}{token.content}"


def _decoded(tokenizer: Any, ids: list[int]) -> list[str]:
    # Decoders may strip the first token's space, so we also decode the ids from the second one on.
    return [tokenizer.decode(part, skip_special_tokens=False) for part in (ids, ids[1:])]
