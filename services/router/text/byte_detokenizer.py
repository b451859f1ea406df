"""Ids to text while they come, of tokenizers whose text is their ids' bytes. Pure.

A character's first bytes are held until its last one comes. All pushes and finish put together are the text
of all ids, however they are cut into pushes.
"""

from codecs import utf_8_decode
from collections.abc import Sequence


class ByteDetokenizer:
    """The text of one stream of ids. `pieces` are the bytes of each id, empty of silent ones; ids beyond them
    are silent, too."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._held = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text that is final; "" while a character is incomplete."""
        data = self._held + self._bytes_of(token_ids)
        text, num_read = utf_8_decode(data, "replace", False)
        self._held = data[num_read:]
        return text

    def finish(self) -> str:
        """What was held back."""
        rest, self._held = self._held, b""
        return rest.decode(errors="replace")

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes:
        pieces = self._pieces
        try:
            return b"".join(map(pieces.__getitem__, token_ids))
        except IndexError:
            return b"".join(pieces[token_id] for token_id in token_ids if token_id < len(pieces))
