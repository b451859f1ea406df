"""A tokenizer.json says what ids stand for (github.com/huggingface/tokenizers). This module is pure."""

from collections.abc import Mapping
from typing import Any


def ids_of(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the token of each id, added ones included.

    What a later format says otherwise gives none.
    """
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        tokens = {int(token_id): str(token) for token, token_id in vocabulary.items()}
    else:  # Unigram has a list of tokens and scores
        tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(vocabulary)}
    added = tokenizer.get("added_tokens") or ()
    return tokens | {int(entry["id"]): str(entry["content"]) for entry in added}


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> int | None:
    """Return the lowest id that is another token, or in one of them alone."""
    ours, theirs = ids_of(one), ids_of(other)
    return min((i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)), default=None)
