"""These tests show what is told of turns."""

import pytest

from cli.chat.turns import answered, finish, plain_answer
from services.cli.conversation import ChatTurn, placed, statistics, summary
from services.wire.isthmus.v1 import common_pb2

pytestmark = pytest.mark.long


def test_figures_of_a_turn(subtests):
    with subtests.test("one line says what was found and what moved"):
        line = summary(plain_answer())
        assert line == "192 of 255 found on decode/1, 40.0 KiB moved, TTFT 18 ms, 6 tokens/s"
        stopped = answered(
            {"token_ids": [1], "finish": finish(moved=0, reason=common_pb2.FINISH_REASON_ABORTED)}
        )
        assert summary(stopped) == "192 of 255 found on decode/1, nothing moved, TTFT 18 ms, stopped"
    with subtests.test("what never came has no figures"):
        assert summary(answered({"finish": {"reason": common_pb2.FINISH_REASON_ABORTED}})) == "stopped"
        assert summary(answered()) == "no end came"
        assert statistics([ChatTurn("q", answered())], 80) == "nothing has been answered yet"
    with subtests.test("turns are told with their stages"):
        turns = [ChatTurn("q", plain_answer(found=0)), ChatTurn("q", plain_answer(moved=0))]
        lines = statistics(turns, 80).splitlines()
        assert max(map(len, lines)) <= 80
        rows = [line.split() for line in lines]
        assert ["1", "decode/1", "remote", "255", "0", "255", "40.0", "KiB", "5", "18.0", "6.0"] in rows
        assert ["2", "decode/1", "local", "255", "192", "0", "0", "B", "5", "18.0", "6.0"] in rows
        # A stage that took nothing has no column; route's 10 us are nothing.
        assert "#  tokenize  prefill compute  transfer  TTFT" in lines
        assert ["1", "2.0", "12.0", "4.0", "18.0"] in rows
    with subtests.test("the last placement is told beside what was true"):
        where, beside = placed(plain_answer()).split("; ")
        assert where == "last turn: decode/1, computed by prefill/0, plan remote (pinned)"
        assert beside == "expected 208 tokens there, found 192"
