from hypothesis import given, settings
from hypothesis import strategies as st

from services.index.pin_mirror import PinMirror
from services.index.pins import KnownPin, Pin
from services.kv.types import Generation, RankId

PIN = Pin(RankId("d", 0, Generation(1)))
NAMES = [str(number) for number in range(8)]
names = st.lists(st.sampled_from(NAMES), unique=True, max_size=8)
operations = st.one_of(
    st.tuples(st.just("put"), names),
    st.tuples(st.just("remove"), names),
    st.tuples(st.just("listed"), names),
    st.tuples(st.just("broken off"), names),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(operations, max_size=12), st.integers(1, 9))
def test_it_holds_what_etcd_holds_or_the_newest_of_it(story: list[tuple], max_pins: int) -> None:
    """Against a list of (name, revision), the oldest first."""
    mirror, oracle, revision = PinMirror(max_pins), [], 0
    for kind, chosen in story:
        if kind in ("listed", "broken off"):
            mirror.begin_listing()
        for name in chosen:
            revision += 1
            oracle = [entry for entry in oracle if entry[0] != name]
            if kind == "remove":
                mirror.remove(name)
                continue
            mirror.put(name, KnownPin(PIN, revision))
            oracle = [*oracle, (name, revision)][-max_pins:]
        if kind == "listed":
            mirror.end_listing()
            oracle = [entry for entry in oracle if entry[0] in chosen]
        held = [(name, pin.revision) for name in NAMES if (pin := mirror.get(name)) is not None]
        assert held == sorted(oracle) and len(mirror) == len(oracle)
