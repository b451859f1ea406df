"""Ids to text while they come, of tokenizers whose text is their ids' bytes. Pure.

A character's first bytes are held until its last one comes. All pushes and finish put together are the text
of all ids, however they are cut into pushes.
"""

from codecs import utf_8_decode
from collections.abc import Sequence

from services.router.text.byte_pieces import Pieces


class ByteDetokenizer:
    """The text of one stream of ids. Silent ones have no bytes in `pieces`."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._held = b""
        self._drops_space = pieces.drops_space  # as long as there is no text

    def push(self, token_ids: Sequence[int]) -> str:
        """The new text that is final; "" while a character is incomplete."""
        data = self._held + self._bytes_of(token_ids)
        text, num_read = utf_8_decode(data, "replace", False)
        self._held = data[num_read:]
        return self._begun(text) if text and self._drops_space else text

    def finish(self) -> str:
        """What was held back."""
        rest, self._held = self._held, b""
        return rest.decode(errors="replace")

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes:
        try:
            return b"".join(map(self._pieces.of_ids.__getitem__, token_ids))
        except IndexError:
            return self._pieces.joined(token_ids)

    def _begun(self, text: str) -> str:
        self._drops_space = False
        return text.removeprefix(" ")
