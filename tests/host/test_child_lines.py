"""A child's output of any shape is read to its end."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from services.host.child_processes import child_lines


async def lines_of(*chunks):
    stream = asyncio.StreamReader()
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    return [line async for line in child_lines(stream)]


@given(st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"\r", b"\n")), max_size=5))
def test_lines_are_those_of_the_whole(chunks):
    whole = b"".join(chunks)
    expected = [line.decode(errors="replace").rstrip() for line in whole.removesuffix(b"\n").split(b"\n")]
    assert asyncio.run(lines_of(*chunks)) == (expected if whole else [])


async def test_a_line_of_any_length_is_passed_on_and_so_is_the_next(subtests):
    for length in [2**16 - 1, 2**16, 2**21 + 3]:
        with subtests.test(length=length):
            lines = await lines_of(b"x" * length + b"\n", b"y\n")
            assert "".join(lines) == "x" * length + "y"
            assert lines[-1] == "y"
