"""Transfers of a prefill rank as stories; transfer_story.py says what its commands are."""

import pytest

from plugins.transcripts import stem, transcripts_beside
from transfer.sending.transfer_story import Transfers


@pytest.mark.parametrize("path", transcripts_beside(__file__), ids=stem)
def test_transfers(path, play):
    play(path, Transfers().perform)
