from hypothesis import given, settings
from hypothesis import strategies as st

from services.index.pins import KnownPin, Pin, PinMirror
from services.values.rank import Generation, RankId

PIN = Pin(RankId("d", 0, Generation(1)))
NAMES = [str(number) for number in range(8)]
names = st.lists(st.sampled_from(NAMES), unique=True, max_size=8)
operations = st.one_of(
    st.tuples(st.sampled_from(["put", "remove"]), names),
    st.tuples(st.just("listed"), names),  # these have gone meanwhile
    st.tuples(st.just("broken off"), names),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(operations, max_size=12), st.integers(1, 9))
def test_it_holds_what_etcd_holds_or_the_newest_of_it(story: list[tuple], max_pins: int) -> None:
    """Against lists of (revision, name), the oldest first."""
    mirror, etcd, oracle, revision = PinMirror(max_pins), [], [], 0
    for kind, chosen in story:
        if kind in ("listed", "broken off"):
            etcd = [(at, name) for at, name in etcd if name not in chosen]
            mirror.begin_listing()
            listing = sorted(etcd, key=lambda entry: entry[1])
            for at, name in listing if kind == "listed" else listing[:2]:
                mirror.put(name, KnownPin(PIN, at))
            if kind == "broken off":  # then there is another
                mirror.begin_listing()
                for at, name in listing:
                    mirror.put(name, KnownPin(PIN, at))
            mirror.end_listing()
            oracle = etcd[-max_pins:]
        else:
            for name in chosen:
                revision += 1
                etcd, oracle = ([entry for entry in of if entry[1] != name] for of in (etcd, oracle))
                if kind == "remove":
                    mirror.remove(name)
                else:
                    mirror.put(name, KnownPin(PIN, revision))
                    etcd, oracle = [*etcd, (revision, name)], [*oracle, (revision, name)][-max_pins:]
        assert [(pin.revision, name) for name, pin in mirror.items()] == oracle
