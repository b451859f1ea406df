"""The runner of transcripts itself."""

import pytest

from plugins.transcripts import Command, played
from services.values.errors import ProtocolError

STORY = """\
# It begins.

# Someone counts.
count to=2
----
1
2
"""


def count(command):
    for number in range(int(command.options["to"])):
        yield str(number + 1)


def test_a_story_is_played_and_told(subtests):
    with subtests.test("a story that goes as it is told is the same text"):
        assert played(STORY, count) == STORY

    with subtests.test("another output is another text and comments stay"):
        assert played(STORY.replace("to=2", "to=1"), count) == STORY.replace("to=2", "to=1").replace(
            "1\n2\n", "1\n"
        )
        assert played("# It begins.\n\n\n# Someone counts.\ncount to=2\n", count) == STORY

    with subtests.test("a command has words options and a body"):
        heard = []
        played("move a b to=c\n1 x\n2 y\n----\nold\n", lambda command: heard.append(command) or ())
        assert heard == [Command("move", ("a", "b"), {"to": "c"}, ("1 x", "2 y"))]

    with subtests.test("what is refused is told"):

        def refuse(command):
            yield "first this"
            raise ProtocolError("not now")

        assert played("go\n", refuse) == "go\n----\nfirst this\nProtocolError: not now\n"

    with (
        subtests.test("a line that would end the block is a fault of the test"),
        pytest.raises(AssertionError, match="cannot hold"),
    ):
        played("go\n", lambda command: [""])


def test_a_story_that_changed_fails_and_is_rewritten_by_the_flag(pytester):
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makeconftest('pytest_plugins = ["plugins.transcripts"]')
    story = pytester.path / "story.txt"
    story.write_text("count to=1\n----\n3\n")
    pytester.makepyfile(
        f"""
        from pathlib import Path
        def test_it(play):
            play(Path({str(story)!r}), lambda command: ["1"])
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(failed=1)
    assert "3" in story.read_text()
    pytester.runpytest_inprocess("-p", "no:cacheprovider", "--rewrite-transcripts").assert_outcomes(passed=1)
    assert story.read_text() == "count to=1\n----\n1\n"
