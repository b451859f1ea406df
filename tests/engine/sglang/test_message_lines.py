"""Messages as lines, however the bytes of them come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.sglang import reports
from services.engine.sglang.reports import (
    ORDERS,
    REPORTS,
    Abort,
    Generate,
    LineSplitter,
    Outputs,
    decode,
    encode,
)
from services.values.errors import ProtocolError


@given(st.lists(st.binary(max_size=20)), st.randoms(use_true_random=False))
def test_lines_come_whole_however_they_are_cut(told, random):
    text = [line.replace(b"\n", b"") for line in told]
    sent, splitter, received = b"".join(line + b"\n" for line in text), LineSplitter(), []
    while sent:
        size = random.randint(0, 7)
        received += splitter.feed(sent[:size])
        sent = sent[size:]
    assert received == text


def test_of_a_line_that_is_too_long_nobody_reads_anything(subtests, monkeypatch):
    for piece in [1, 7, 60]:
        with subtests.test(piece=piece):
            monkeypatch.setattr(reports, "MAX_LINE_BYTES", 50)
            long, splitter, received = encode(Abort("x" * 200)), LineSplitter(), []
            for start in range(0, len(long), piece):
                received += splitter.feed(long[start : start + piece])
                assert splitter._begun_bytes <= max(50, piece)
            (rest,) = received
            with pytest.raises(ProtocolError):
                decode(rest, ORDERS)
            assert splitter.feed(encode(Abort("y"))) == [encode(Abort("y"))[:-1]]


def test_messages_as_lines(subtests):
    for message in [Abort("7"), Generate({"rid": "7", "input_ids": [1, 2]})]:
        with subtests.test(message=message):
            assert decode(encode(message), ORDERS) == message
            with pytest.raises(ProtocolError):
                decode(encode(message), REPORTS)
    with subtests.test("a logprob that is no number survives"):
        (chunk,) = decode(encode(Outputs([{"logprobs": [float("-inf"), None]}])), REPORTS).chunks
        assert chunk["logprobs"] == [float("-inf"), None]
    with subtests.test("looks that find nothing leave nothing"):
        splitter = LineSplitter()
        for _ in range(3):
            assert splitter.feed(b"") == []
        assert splitter._begun == [] and not splitter.has_begun
        splitter.feed(b"half")
        assert splitter.has_begun
        assert splitter.feed(b" a line\n") == [b"half a line"] and not splitter.has_begun
