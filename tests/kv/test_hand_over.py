"""A rank that leaves hands prefixes over in an order, to some; nothing younger goes for them."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv.hand_over import HandOver, IdlePrefix, spell
from services.kv.prefix_cache import PrefixCache
from services.kv.radix_tree import Node, Scope

ROOT = Node(Scope("", 0))

prefixes = st.builds(
    IdlePrefix,
    st.just(ROOT),
    st.just(""),
    st.integers(1, 40),
    st.integers(0, 40),
    st.floats(0, 100),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=2).map(tuple),
)
ANSWERS = ("taken", "part", "no_room", "failed", "out", "busy", "dropped")


@given(st.lists(prefixes, max_size=12), st.integers(0, 3), st.data())
@settings(deadline=None, max_examples=200)
def test_each_prefix_is_offered_in_its_turn_and_accounted_for_once(listed, num_successors, data):
    plan = HandOver(listed, range(num_successors))
    order = sorted(listed, key=lambda each: (not each.is_protected, each.idle_s))
    tried, out, offered = Counter(), set(), []
    handed = left = dropped = busy = 0
    while True:
        while (found := plan.next()) is not None:
            prefix, successor = found
            offered.append(found)
            assert successor not in out and tried[id(prefix), successor] == 0
            assert sum(to == successor for _, to in offered) <= 2
        if not offered:
            break
        prefix, successor = offered.pop(data.draw(st.integers(0, len(offered) - 1)))
        answer = data.draw(st.sampled_from(ANSWERS if busy < 20 else ANSWERS[:-2]))
        match answer:
            case "taken" | "part":
                held = prefix.tokens if answer == "taken" else prefix.tokens // 2
                handed, left = handed + held, left + prefix.tokens - held
                plan.taken(prefix, held, data.draw(st.integers(0, 99)))
            case "no_room":
                out.add(successor)
                plan.no_room(prefix)
            case "failed" | "out":
                tried[id(prefix), successor] += 1
                out |= {successor} if answer == "out" else set()
                plan.failed(prefix, is_out=answer == "out")
            case "busy":
                busy += 1
                plan.busy(prefix)
            case "dropped":
                dropped += prefix.tokens
                plan.dropped(prefix)
    assert plan.outcome.handed_tokens == handed and plan.outcome.left_tokens >= left
    assert handed + plan.outcome.left_tokens + dropped == sum(prefix.tokens for prefix in listed)
    first = HandOver(listed, range(1)).next() if order else None
    assert first is None or first[0] is order[0]


def test_what_shares_half_goes_together_and_the_rest_where_there_is_room():
    def one(tokens, *forks):
        return IdlePrefix(ROOT, "", tokens, 0, 1.0, forks)

    first, near, far, other = one(40, (1, 4), (2, 30)), one(40, (1, 4), (2, 30)), one(40, (1, 4)), one(8)
    plan = HandOver([first, near, far, other], ["a", "b"])
    offers = dict([plan.next(), plan.next(), plan.next(), plan.next()])
    assert offers[first] == offers[near] != offers[far] == offers[other]
    assert plan.next() is None
    plan.taken(first, 40, 100)
    plan.end()
    assert (plan.outcome.handed_tokens, plan.outcome.left_tokens) == (40, 88)


class Timed:
    """A cache by a clock, and what it should hold: a prefix of one page each, by when it was used last."""

    def __init__(self, num_pages):
        self.now = 0.0
        self.cache = PrefixCache(num_pages, 1, 1, "m", protected_share=0.3, clock=lambda: self.now)

    def use(self, name, *, twice=False, idle_s=None, protected=False):
        """Return whether it is here now: one that comes idle may find no room."""
        pages = self.cache.open([name], "", protect=twice, idle_s=idle_s)
        if not pages.pages:
            got = 1 if idle_s is None and self.cache.extend(pages, 1) else 0
            if idle_s is not None:
                got = self.cache.extend_idle(pages, 1, protected=protected)
            if not got:
                self.cache.close(pages)
                return False
            self.cache.publish(pages, [name])
        self.cache.close(pages)
        self.cache.check()
        return True

    def held(self):
        return {spell(each.node)[0]: each for each in self.cache.idle_prefixes()}


STEP_S = 0.11  # To a tenth of a second times are known.
uses = st.tuples(st.integers(0, 9), st.booleans(), st.floats(0.5, 5.0))
comers = st.tuples(st.integers(10, 19), st.floats(0.0, 40.0), st.booleans())


@given(st.lists(uses, min_size=1, max_size=20), st.lists(comers, min_size=1, max_size=8))
@settings(deadline=None, max_examples=200)
def test_what_comes_displaces_nothing_that_was_used_since(used, coming):
    timed = Timed(6)
    ages = {}
    for name, twice, later_s in used:
        timed.now += later_s
        timed.use(name, twice=twice)
        ages[name] = timed.now
    for name, idle_s, protected in coming:
        before = timed.held()
        here = timed.use(name, idle_s=idle_s, protected=protected)
        after = timed.held()
        last_use = timed.now - idle_s
        gone = before.keys() - after.keys()
        assert all(ages[other] < last_use + STEP_S for other in gone), (name, idle_s, gone)
        assert protected or not any(before[other].protected_tokens for other in gone)
        assert len(gone) <= here
        # To a step of the clock everything that is older could go for it.
        if not here:
            assert not any(
                ages[other] < last_use - STEP_S and (protected or not each.protected_tokens)
                for other, each in before.items()
            )
        else:
            ages[name] = max(ages.get(name, last_use), last_use)
            told = timed.now - after[name].idle_s
            assert ages[name] - STEP_S - idle_s / 25 <= told <= ages[name] + 1e-6


def test_a_prefix_is_told_by_its_end_its_forks_and_what_was_wanted_twice():
    cache = PrefixCache(16, 2, 2, "m")
    for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8, 9]):
        pages = cache.open(ids, "salt")
        cache.extend(pages, -(-len(ids) // 2) - len(pages.pages))
        cache.publish(pages, ids)
        if ids[-1] != 9:
            cache.close(pages)
    (told,) = cache.idle_prefixes()  # The other one is in use.
    assert (told.salt, told.tokens, told.protected_tokens) == ("salt", 6, 4)
    assert [tokens for _, tokens in told.forks] == [4] and told.is_protected
    assert spell(told.node) == (1, 2, 3, 4, 5, 6)
    cache.close(pages)
    assert {spell(each.node) for each in cache.idle_prefixes()} == {(1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7, 8)}
    cache.clear()
    assert spell(told.node) is None
