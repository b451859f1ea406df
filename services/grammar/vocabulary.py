r"""A vocabulary has the bytes of each id of a model, from its tokenizer.json.

Families write them in one of these ways:

    byte-level BPE      "Ġa"         " a"       GPT-2's alphabet: a character for each byte
    byte fallback       "▁a" "<0x0A>"  " a" "\n"  sentencepiece's: a space is U+2581
    neither             "a"          "a"        a token is its text

Special tokens have no bytes, as no text contains them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.model.tokenizer_json import SPACE, bytes_of_byte_level, bytes_of_sentencepiece, ids_of
from services.values.errors import ConfigError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`pieces[id]` are the id's bytes.

    A special token's piece is its name in UTF-8. The piece is empty where there is no such id.
    """

    pieces: tuple[bytes, ...]
    special: frozenset[int]


def read_vocabulary(directory: Path, vocab_size: int) -> Vocabulary:
    """Read the vocabulary of `vocab_size` ids, whether there are more tokens or fewer.

    Raises ConfigError without a tokenizer.json that has the tokens' bytes.
    """
    tokenizer = _read(directory / "tokenizer.json")
    try:
        tokens = ids_of(tokenizer)
        special = _special_ids(directory, tokenizer, tokens)
        added = {int(entry["id"]) for entry in tokenizer.get("added_tokens") or ()}
        piece_of = _decoder_of(tokenizer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{directory / 'tokenizer.json'} is none that can be read: {error!r}") from error
    pieces = [b""] * vocab_size
    for token_id, token in tokens.items():
        if token_id < vocab_size:
            pieces[token_id] = token.encode() if token_id in added else piece_of(token)
    return Vocabulary(tuple(pieces), frozenset(i for i in special if i < vocab_size))


def _read(path: Path) -> dict[str, Any]:
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(tokenizer, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return tokenizer


def _special_ids(directory: Path, tokenizer: Mapping[str, Any], tokens: Mapping[int, str]) -> set[int]:
    """Return the ids that tokenizer.json or tokenizer_config.json declares to be special.

    The latter is read as transformers reads it.
    """
    special = {int(entry["id"]) for entry in tokenizer.get("added_tokens") or () if entry.get("special")}
    path = directory / "tokenizer_config.json"
    config = _read(path) if path.is_file() else {}
    names = set(_special_names(config))
    special |= {token_id for token_id, token in tokens.items() if token in names}
    added = (config.get("added_tokens_decoder") or {}).items()
    return special | {int(token_id) for token_id, token in added if token.get("special")}


def _special_names(config: Mapping[str, Any]) -> Iterator[str]:
    listed = [config.get(key) for key in _NAMED]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or ()
        listed += more.values() if isinstance(more, Mapping) else more
    for token in listed:
        if token is not None:
            yield token["content"] if isinstance(token, Mapping) else token


def _decoder_of(tokenizer: Mapping[str, Any]) -> Callable[[str], bytes]:
    kinds = set(_kinds(tokenizer.get("decoder")))
    if "ByteLevel" in kinds:
        return bytes_of_byte_level
    if kinds & {"ByteFallback", "Metaspace"} or _replaces_spaces(tokenizer.get("decoder")):
        return bytes_of_sentencepiece
    if kinds <= {"Fuse"}:
        return str.encode
    raise ValueError(f"its decoder is {sorted(kinds)}")


def _kinds(decoder: Any) -> Iterator[str]:
    if decoder:
        nested = decoder.get("decoders")
        yield from (kind for one in nested for kind in _kinds(one)) if nested else [str(decoder["type"])]


def _replaces_spaces(decoder: Any) -> bool:
    return SPACE in json.dumps(decoder, ensure_ascii=False)
