"""Masks against what a matcher says of each id by itself."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactness.checkpoints import tiny_checkpoint
from grammar.written import ids_of_text, write_tokenizer
from services.grammar.grammars import Grammars
from services.grammar.matcher import MaskMaker, MaskRequest, Masks, Matcher
from services.grammar.vocabulary import read_vocabulary
from services.values.request import Constraint, ConstraintKind

VOCAB_SIZE = 300  # more than there are tokens
EOS, SPECIAL, AB = 256, 257, 260
MAKER = MaskMaker(VOCAB_SIZE)
CONSTRAINTS = [
    Constraint(ConstraintKind.JSON_OBJECT),
    Constraint(ConstraintKind.JSON_SCHEMA, ('{"type":"array","items":{"type":"boolean"},"maxItems":3}',)),
    Constraint(ConstraintKind.REGEX, ("(ab|a)*c?",)),
    Constraint(ConstraintKind.CHOICE, ("yes", "yesterday", "no")),
    Constraint(ConstraintKind.GRAMMAR, ('start: "é" start? "x"',)),
]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Id i is byte i."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, '{"', '":', "ab", "aba", "yes", "true,", "e]", "xx")
    return Grammars(directory, VOCAB_SIZE)


def allowed(masks: Masks, row: int) -> set[int]:
    ids = set(map(int, np.flatnonzero(masks.expanded()[row])))
    assert ids == {token_id for token_id in range(VOCAB_SIZE) if masks.allows(row, token_id)}
    return ids


def by_itself(matcher: Matcher) -> set[int]:
    return {token_id for token_id in range(VOCAB_SIZE) if matcher.may_choose(token_id)}


def expected_of(matcher: Matcher) -> set[int]:
    """Return what it says of each id.

    Text that it dictates is written in one way alone, whoever asks.
    """
    may, plain = by_itself(matcher), allowed(MAKER.make([MaskRequest(matcher)]), 0)
    assert plain == may or (len(plain) == 1 and plain < may)
    return plain


@given(
    st.lists(st.tuples(st.sampled_from(CONSTRAINTS), st.integers(0, 12), st.integers(0, 4)), max_size=4),
    st.lists(st.sampled_from([EOS, SPECIAL, *b'"c,}']), unique=True),
    st.integers(0, 2**32),
)
def test_a_row_allows_what_may_come_there(
    grammars: Grammars, sequences: list[tuple[Constraint, int, int]], ending_ids: list[int], seed: int
) -> None:
    chance, asked, expected, alone = random.Random(seed), [], [], []
    for constraint, num_tokens, num_drafts in sequences:
        matcher = grammars.matcher(constraint, ending_ids=ending_ids)
        _walk(matcher, num_tokens, chance)
        going, drafts = matcher.copy(), list[int]()
        expected.append(by_itself(going))
        alone += _mask_of(going)
        for _ in range(num_drafts):
            if not (step := _walk(going, 1, chance)):
                break
            drafts += step
            expected.append(expected_of(going))
            alone += _mask_of(going)
        asked.append(MaskRequest(matcher, drafts))
    before = [by_itself(each.matcher) for each in asked]
    masks = MAKER.make(asked)
    rows = [allowed(masks, row) for row in range(len(masks))]
    assert rows == alone
    for row, expected_ids in zip(rows, expected, strict=True):
        # What the constraint dictates may be written in one way alone.
        assert row == expected_ids or (len(row) == 1 and row < expected_ids)
    assert [by_itself(each.matcher) for each in asked] == before


def _mask_of(matcher: Matcher) -> list[set[int]]:
    return [allowed(MAKER.make([MaskRequest(matcher)]), 0)]


def _walk(matcher: Matcher, num_tokens: int, chance: random.Random) -> list[int]:
    """Chosen at random among those that do not end it, as far as there are any."""
    taken: list[int] = []
    while len(taken) < num_tokens and (may := sorted(by_itself(matcher) - matcher.ends.token_ids)):
        taken.append(chance.choice(may))
        matcher.advance(taken[-1:])
    return taken


def test_what_ends_an_answer_is_allowed_where_its_text_is_whole(subtests, grammars):
    """A stop token may be one that the text could hold."""
    for ending in ["", "c"]:
        with subtests.test(ending=ending):
            ends = [EOS, *ending.encode()]
            matcher = grammars.matcher(Constraint(ConstraintKind.REGEX, ("ac*b?",)), ending_ids=ends)
            masks = MAKER.make([MaskRequest(matcher, list(b"ab"))])
            a, b, c = b"abc"
            assert [allowed(masks, row) for row in range(3)] == [{a, AB}, {b, c, EOS}, {EOS, *ends}]


def test_a_dead_end_behind_a_draft_harms_no_other_row() -> None:
    """`characters` has no line break: after "ax" the text cannot go on, and after "ay" it can."""
    directory = tiny_checkpoint()
    vocabulary, maker = read_vocabulary(directory, 512), MaskMaker(512)
    constraint = Constraint(ConstraintKind.REGEX, (r"a(x\n|yz)",))
    matcher = Grammars(directory, 512).matcher(constraint)
    a, x, y, z = ids_of_text(vocabulary, "axyz")
    masks = maker.make([MaskRequest(matcher, [a, x])])
    assert [set(np.flatnonzero(row)) for row in masks.expanded()] == [{a}, {x, y}, set()]
    assert matcher.num_fitting([a, y, z]) == 3
    matcher.advance([a, x])
    [row] = maker.make([MaskRequest(matcher)]).expanded()
    assert not row.any()
    assert matcher.problem


def test_what_is_dictated_is_written_in_long_tokens_and_rows_are_counted(subtests, grammars):
    with subtests.test("what is dictated is written in long tokens"):
        # Byte by byte a model would write what it has never seen, and take a step for each.
        schema = '{"type":"object","properties":{"yes":{}},"required":["yes"],"additionalProperties":false}'
        matcher = grammars.matcher(Constraint(ConstraintKind.JSON_SCHEMA, (schema,)))
        written = b""
        for expected in (b'{"', b"yes", b'":'):
            [ids] = _mask_of(matcher)
            [token_id] = ids
            written += expected
            matcher.advance([token_id])
            assert matcher.inner.validate_tokens(list(b"1")) == (written == b'{"yes":')
        assert len(written) == 7
    with subtests.test("rows and their time are counted"):
        ticks = iter([1.0, 1.5])
        maker = MaskMaker(VOCAB_SIZE, lambda: next(ticks))
        matcher = grammars.matcher(CONSTRAINTS[0])
        maker.make([MaskRequest(matcher), MaskRequest(matcher, list(b"{"))])
        assert (maker.counts.rows, maker.counts.seconds) == (3, 0.5)
