"""Rooms of a prefill rank as stories; room_story.py says what its commands are."""

import pytest

from plugins.transcripts import stem, transcripts_beside
from transfer.sending.room_story import Rooms


@pytest.mark.parametrize("path", transcripts_beside(__file__), ids=stem)
def test_rooms(path, play):
    play(path, Rooms().perform)
