"""The handshake as stories, from both its ends; two_ends.py says what their commands are."""

from pathlib import Path

import pytest

from plugins.transcripts import played, stem, transcripts_beside
from services.kv import handshake
from transfer.pull_story import Pulls
from transfer.sending.transfer_story import Transfers
from transfer.two_ends import TwoEnds

STORIES = transcripts_beside(__file__)
OF_PULLS = transcripts_beside(__file__, "pulls")
OF_TRANSFERS = transcripts_beside(str(Path(__file__).parent / "sending" / "test_transcripts.py"))


@pytest.mark.parametrize("path", OF_PULLS, ids=stem)
def test_pulls(path, play):
    play(path, Pulls().perform)


@pytest.mark.parametrize("path", STORIES, ids=stem)
def test_the_handshake(path, play):
    play(path, TwoEnds().perform)


def test_the_stories_go_through_every_row_of_all_tables(monkeypatch):
    """A row that no story reaches is one too many, or a story is missing."""
    look_up, reached = handshake._look_up, set()

    def note(table, state, event):
        reached.add((state, event))
        return look_up(table, state, event)

    monkeypatch.setattr(handshake, "_look_up", note)
    for path in STORIES:
        played(path.read_text(), TwoEnds().perform)
    for path in OF_PULLS:
        played(path.read_text(), Pulls().perform)
    for path in OF_TRANSFERS:
        played(path.read_text(), Transfers().perform)
    assert {*handshake.RESERVATION, *handshake.TRANSFER, *handshake.PULL} - reached == set()
