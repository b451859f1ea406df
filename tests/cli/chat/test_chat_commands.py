"""Lines that begin with a slash."""

import io
import json

import pytest

from cli.chat.test_conversation import conversation
from cli.chat.turns import plain_answer
from services.cli.chat import CHAT_COMMANDS, Leave, Session, obey
from services.cli.chat_terminal import Plain, completer, piped
from services.cli.conversation import ChatTurn
from services.net import channels
from services.values.errors import InvalidRequest

pytestmark = pytest.mark.long


@pytest.fixture
async def session():
    talk = conversation(system="Be brief.")
    talk.turns.append(ChatTurn("Hello", plain_answer()))
    async with channels.open_channel("127.0.0.1:1") as channel:
        yield Session(channel, talk, Plain(), "127.0.0.1:1", 5.0)


async def test_commands_that_need_no_router(subtests, session, tmp_path, capsys):
    with subtests.test("a conversation is saved once"):
        for name in ("said.txt", "said.json"):
            await obey(session, f"/save {tmp_path / name}")
            with pytest.raises(InvalidRequest, match="File exists"):
                await obey(session, f"/save {tmp_path / name}")
        text = (tmp_path / "said.txt").read_text()
        assert text.splitlines() == ["system:", "Be brief.", "", "user:", "Hello", "", "assistant:", "Hi"]
        said = json.loads((tmp_path / "said.json").read_text())
        assert [message["role"] for message in said["messages"]] == ["system", "user", "assistant"]
        assert said["messages"][2]["token_ids"] == [7, 8, 9, 10, 11]
        assert said["turns"][0]["usage"]["decode_prefix_len"] == 192
    for line, sentence in [
        ("/hlp", r"there is no command /hlp; did you mean /help\? \(/help lists them\)"),
        ("/xyzzy now", r"there is no command /xyzzy \(/help lists them\)"),
        ("/save", "/save FILE: which file"),
        ("/save /no/such/place", "/save: .*No such file"),
    ]:
        with subtests.test(line), pytest.raises(InvalidRequest, match=sentence):
            await obey(session, line)
    with subtests.test("what stays here needs no router"):
        await obey(session, "/stats")
        assert "decode/1" in capsys.readouterr().out
        await obey(session, "/system Be long. And wide.")
        assert session.conversation.system == "Be long. And wide."
        await obey(session, "/system")
        assert session.conversation.system == ""
        await obey(session, "/reset")
        assert not session.conversation.turns and session.conversation.id == "c2"
        await obey(session, "/help")
        said = capsys.readouterr().out
        assert all(f"/{name}" in said for name in CHAT_COMMANDS)
        assert max(map(len, said.splitlines())) <= 80
        with pytest.raises(Leave):
            await obey(session, "/quit")


def test_lines_are_completed_and_a_pipe_is_read(subtests, monkeypatch):
    with subtests.test("commands are completed"):
        complete = completer([*CHAT_COMMANDS])
        assert [complete("/s", state) for state in range(4)] == ["/stats", "/system", "/save", None]
        assert complete("", 0) is None and complete("hello", 0) is None
    with subtests.test("each line of a pipe is a turn"), monkeypatch.context() as patch:

        def reading(raw):
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
            return list(piped())

        assert reading("für\n\n  \n dich \n/stats".encode()) == ["für", "dich", "/stats"]
        with pytest.raises(InvalidRequest, match="UTF-8"):
            reading(b"a\n\xff\n")
