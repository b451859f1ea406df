"""Values that cross the wire, of all kinds and sizes."""

from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from services.values.kv import (
    PageRun,
)
from services.values.rank import (
    Generation,
    PullSource,
    RankAddress,
    RankId,
    Rendezvous,
    TransferId,
)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e9)
names = st.text(min_size=1, max_size=12)
ids = st.lists(uint32, max_size=8).map(tuple)


def float32(low: float, high: float, **kwargs: bool) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, **kwargs)


ranks = st.builds(RankId, names, uint32, uint64.map(Generation))
addresses = st.builds(RankAddress, ranks, names)
sources = st.builds(PullSource, addresses, uint32)
rendezvous = st.builds(Rendezvous, uint64.map(TransferId), ranks, ranks)
runs = st.builds(PageRun, uint32, st.integers(1, 2**32 - 1))


def over_the_wire(pb: Message) -> Message:
    return type(pb).FromString(pb.SerializeToString())


def check_round_trips(module, noun, values):
    """Check that what `module` writes of a value of this noun, it reads again."""
    to_proto, from_proto = getattr(module, f"{noun}_to_proto"), getattr(module, f"{noun}_from_proto")

    @given(values)
    def check(value):
        assert from_proto(over_the_wire(to_proto(value))) == value

    check()
