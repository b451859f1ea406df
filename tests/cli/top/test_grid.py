import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from services.cli.look.top_drawing import ASCII, BLOCKS, Bar, Column, grid

pytestmark = pytest.mark.long

columns = st.builds(
    Column,
    st.text("abc", min_size=1, max_size=8),
    st.booleans(),
    st.integers(0, 2),
    st.none() | st.integers(1, 6),
)
bars = st.builds(Bar, st.integers(0, 50), st.integers(0, 50), st.integers(100, 200))
cells = st.text("xyz", max_size=20) | st.builds(Text, st.text("xyz", max_size=20)) | bars


@settings(max_examples=40)
@given(st.data(), st.integers(1, 120))
def test_no_line_is_longer_than_the_terminal(data, width):
    heads = data.draw(st.lists(columns, min_size=1, max_size=8))
    rows = data.draw(st.lists(st.tuples(*(cells for _ in heads)), max_size=4))
    lines = grid(heads, rows, width, ASCII)
    assert len(lines) == len(rows) + 1
    assert all(len(line) <= width and "\n" not in line.plain for line in lines)


def plain(heads, rows, width):
    return [line.plain for line in grid(heads, rows, width, ASCII)]


def test_columns_and_bars(subtests):
    with subtests.test("columns are as wide as they need and bars take the rest"):
        heads = [Column("rank"), Column("pool", most=12), Column("run", right=True)]
        rows = [["d0", Bar(1, 1, 2), "7"], ["prefill", Bar(0, 0, 2), "12"]]
        assert plain(heads, rows, 80) == [
            "rank     pool          run",
            "d0       ######======    7",
            "prefill  ............   12",
        ]
        assert plain(heads, rows, 22)[1] == "d0       ########    7".replace("########", "####====")
    with subtests.test("names are cut in the middle and spare columns left out"):
        heads = [Column("rank", least=9), Column("tenant", spare=2), Column("trust", spare=1)]
        rows = [["isthmus-decode-large-0/3", "acme", "1.00"]]
        assert plain(heads, rows, 60)[1] == "isthmus-decode-large-0/3  acme    1.00"
        assert plain(heads, rows, 36)[1] == "isthmus-de~-large-0/3  acme    1.00"
        assert plain(heads, rows, 20)[1] == "isthmu~ge-0/3  1.00"
        assert plain(heads, rows, 9)[1] == "isth~-0/3"
    with subtests.test("what is there is seen in a bar however little"):
        assert Bar(1, 0, 10_000).drawn(10, BLOCKS).plain == "█░░░░░░░░░"
        assert Bar(9_999, 1, 10_000).drawn(10, BLOCKS).plain == "█████████▒"
        assert Bar(0, 0, 0).drawn(4, BLOCKS).plain == "    "
        spans = {span.style for span in Bar(1, 1, 3).drawn(9, BLOCKS).spans}
        assert spans == {"green", "yellow", "dim"}
