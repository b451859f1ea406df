"""Tables that fit where they are shown."""

from hypothesis import given
from hypothesis import strategies as st

from services.cli.table import fold, format_table

HEADINGS = ("turn", "decode rank", "decode_prefix_len", "KV moved", "note")
ROWS = [(1, "decode/0", 0, "88.0 KiB", ""), (2, "decode/0", 208, "40.0 KiB", "pinned")]
ONE_LINE = """\
turn  decode rank  decode_prefix_len  KV moved  note
----  -----------  -----------------  --------  ------
   1  decode/0                     0  88.0 KiB
   2  decode/0                   208  40.0 KiB  pinned"""
BROKEN = """\
                decode_
      decode    prefix_  KV
turn  rank          len  moved     note
----  --------  -------  --------  ------
   1  decode/0        0  88.0 KiB
   2  decode/0      208  40.0 KiB  pinned"""
FOLDED = """\
turn  decode rank
----  -----------
   1  decode/0
     decode_prefix_len 0
     KV moved 88.0 KiB
   2  decode/0
     decode_prefix_len 208
     KV moved 40.0 KiB  note pinned"""


cells = st.text(st.characters(min_codepoint=48, max_codepoint=122), max_size=30)
tables = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(cells.filter(bool), min_size=n, max_size=n, unique=True),
        st.lists(st.lists(cells, min_size=n, max_size=n), max_size=3),
    )
)


@given(tables, st.integers(80, 200))
def test_no_line_is_too_wide_and_nothing_is_lost(table, width):
    headings, rows = table
    said = format_table(headings, rows, width)
    assert max(map(len, said.splitlines())) <= width
    assert all(cell in said for row in rows for cell in row)


def test_a_table_is_as_wide_as_there_is_room(subtests):
    for width, table in [(None, ONE_LINE), (54, ONE_LINE), (53, BROKEN), (41, BROKEN), (40, FOLDED)]:
        with subtests.test("a table is as wide as there is room", width=width, table=table):
            said = format_table(HEADINGS, ROWS, width)
            assert said.splitlines() == table.splitlines()
    with subtests.test("what stands side by side can be chosen"):
        said = format_table(HEADINGS, ROWS[1:], 40, lead=("turn", "note")).splitlines()
        assert said == [
            *("turn  note", "----  ------", "   2  pinned"),
            *("     decode rank decode/0", "     decode_prefix_len 208", "     KV moved 40.0 KiB"),
        ]
    with subtests.test("a sentence is folded between words"):
        assert fold("a page   64 tokens", 20, indent=9) == "a page   64 tokens"
        assert fold("a page   64 tokens, 128 KiB", 20, indent=9) == "a page   64 tokens,\n         128 KiB"
        assert fold("a page   64 tokens, 128 KiB", None) == "a page   64 tokens, 128 KiB"
