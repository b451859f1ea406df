import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.index.keys import (
    ClusterKeys,
    HeadKey,
    LogKey,
    PinKey,
    ProbeKey,
    RegistrationKey,
    SchemaKey,
    SnapshotKey,
    pin_name,
)
from services.values.errors import ConfigError
from services.values.rank import RankKey

KEYS = ClusterKeys("prod")
FIRST = string.ascii_letters + string.digits
# As from_regex would, of which the first example alone takes a second.
names = st.builds(str.__add__, st.sampled_from(FIRST), st.text(FIRST + "._:@-", max_size=20))
numbers = st.integers(0, 2**64 - 1)
ranks = st.builds(RankKey, names, st.integers(0, 999_999_999))


def test_keys_are_those_of_the_design(subtests: pytest.Subtests) -> None:
    with subtests.test("keys are those of the design"):
        rank = RankKey("d0", 3)
        assert KEYS.schema == b"/isthmus/prod/schema"
        assert KEYS.registration(rank) == b"/isthmus/prod/ranks/d0/3"
        assert KEYS.head(rank) == b"/isthmus/prod/prefix/d0/3/head"
        assert KEYS.snapshot(rank, 7, 1) == b"/isthmus/prod/prefix/d0/3/snapshot/%020d/%020d" % (7, 1)
        assert KEYS.log(rank, 9) == b"/isthmus/prod/prefix/d0/3/log/%020d" % 9
        assert KEYS.below.log(rank, 9) == b"/isthmus/prod/below/d0/3/log/%020d" % 9
        assert KEYS.below.schema == KEYS.schema
        assert KEYS.probe("r1") == b"/isthmus/prod/probe/r1"
    with subtests.test("one cluster is no prefix of another"):
        assert not ClusterKeys("prod2").schema.startswith(KEYS.prefix)
    for name in ["", "a/b", "a b", "ä", ".hidden", "x" * 201, "a\n"]:
        with subtests.test(name=name):
            with pytest.raises(ConfigError, match="cluster"):
                ClusterKeys(name)
            with pytest.raises(ConfigError, match="worker"):
                KEYS.head(RankKey(name, 0))
            with pytest.raises(ConfigError, match="router"):
                KEYS.probe(name)


@given(ranks, numbers, numbers, names)
def test_every_key_is_parsed_back(rank: RankKey, epoch: int, number: int, name: str) -> None:
    assert KEYS.parse(KEYS.schema) == SchemaKey()
    assert KEYS.parse(KEYS.registration(rank)) == RegistrationKey(rank)
    assert KEYS.parse(KEYS.head(rank)) == HeadKey(rank)
    assert KEYS.parse(KEYS.snapshot(rank, epoch, number)) == SnapshotKey(rank, epoch, number)
    assert KEYS.parse(KEYS.log(rank, number)) == LogKey(rank, number)
    below = KEYS.below
    assert KEYS.parse(below.head(rank)) == HeadKey(rank, below=True)
    assert KEYS.parse(below.snapshot(rank, epoch, number)) == SnapshotKey(rank, epoch, number, below=True)
    assert KEYS.parse(below.log(rank, number)) == LogKey(rank, number, below=True)
    assert KEYS.parse(KEYS.pin(name)) == PinKey(name)
    assert KEYS.parse(KEYS.probe(name)) == ProbeKey(name)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_foreign_keys_are_none_and_never_an_error(rest: bytes) -> None:
    parsed = KEYS.parse(b"/isthmus/prod/" + rest)
    assert parsed is None or isinstance(parsed, SchemaKey | PinKey | ProbeKey | RegistrationKey | HeadKey)
    assert KEYS.parse(rest) is None or rest.startswith(KEYS.prefix)


@given(ranks, numbers, numbers)
def test_key_order_is_number_order(rank: RankKey, a: int, b: int) -> None:
    assert (KEYS.log(rank, a) < KEYS.log(rank, b)) == (a < b)
    assert (KEYS.snapshot_epoch(rank, a) < KEYS.snapshot_epoch(rank, b)) == (a < b)


@given(st.lists(st.text(max_size=300), max_size=10, unique=True))
def test_any_conversation_id_makes_a_short_name_of_its_own(conversations: list[str]) -> None:
    pins = {pin_name(conversation) for conversation in [*conversations, "\ud800 half a character"]}
    assert len(pins) == len(conversations) + 1
    assert all(KEYS.parse(KEYS.pin(name)) == PinKey(name) and len(name) == 32 for name in pins)
