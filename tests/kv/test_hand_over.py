"""A rank that leaves hands prefixes over in an order, to some; nothing younger goes for them."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.transcripts import stem, transcripts_beside
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
    tried, out, offered, resting, held = Counter(), set(), [], set(), Counter()
    dropped = busy = 0
    while True:
        while (found := plan.next()) is not None:
            prefix, successor = found
            offered.append(found)
            assert successor not in out | resting and tried[id(prefix), successor] == 0
            assert sum(to == successor for _, to in offered) <= 2
        if resting:
            plan.rested(resting.pop())
            continue
        if not offered:
            break
        prefix, successor = offered.pop(data.draw(st.integers(0, len(offered) - 1)))
        answer = data.draw(st.sampled_from(ANSWERS if busy < 20 else ANSWERS[:-2]))
        match answer:
            case "taken" | "part":
                tokens = prefix.tokens if answer == "taken" else prefix.tokens // 2
                room_tokens = data.draw(st.integers(0, 99))
                more = plan.taken(prefix, tokens, room_tokens)
                assert more == max(0, tokens - held[id(prefix)])
                held[id(prefix)] += more
                out |= set() if room_tokens else {successor}
            case "no_room":
                out.add(successor)
                plan.no_room(prefix)
            case "failed" | "out":
                tried[id(prefix), successor] += 1
                out |= {successor} if answer == "out" else set()
                plan.failed(prefix, is_out=answer == "out")
            case "busy":
                busy += 1
                resting.add(successor)
                plan.busy(prefix)
            case "dropped":
                rest = plan.dropped(prefix)
                assert rest == prefix.tokens - held[id(prefix)]
                dropped += rest
    assert plan.outcome.handed_tokens == held.total()
    assert held.total() + plan.outcome.left_tokens + dropped == sum(prefix.tokens for prefix in listed)
    first = HandOver(listed, range(1)).next() if order else None
    assert first is None or first[0] is order[0]


def aged(num):
    return [IdlePrefix(ROOT, "", 40, 0, float(age)) for age in range(num)]


def test_the_rest_of_one_that_was_cut_goes_where_there_is_more_room():
    one, other = aged(2)
    plan = HandOver([one, other], ["a", "b"])
    offers = dict([plan.next(), plan.next()])
    assert {offers[one], offers[other]} == {"a", "b"}
    assert plan.taken(one, 24, room_tokens=0) == 24
    assert plan.next() == (one, offers[other])
    assert plan.taken(one, 40, room_tokens=100) == 16 and plan.taken(other, 40, room_tokens=60) == 40
    assert plan.next() is None and (plan.outcome.handed_tokens, plan.outcome.left_tokens) == (80, 0)


def test_none_goes_before_a_younger_one_that_was_refused():
    young, old, oldest = aged(3)
    plan = HandOver([young, old, oldest], ["a"])
    assert [plan.next(), plan.next()] == [(young, "a"), (old, "a")]
    plan.busy(young)
    plan.busy(old)
    assert plan.next() is None
    plan.rested("a")
    assert [plan.next(), plan.next()] == [(young, "a"), (old, "a")]


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


class Stories:
    """A plan of a hand-over, and the commands of its stories:

    leave successors=A,B            the rank leaves; a line a prefix: NAME tokens= idle= [protected=]
    next                            what is offered next, to whom
    taken NAME held= room=          its successor holds so many of its tokens, and has room for so many
    no_room NAME, failed NAME       it has no room; the pull failed
    busy NAME, rested SUCCESSOR     it takes nothing at the moment; it may be asked again
    end                             the time is over
    """

    def perform(self, command):
        words, options = command.words, command.options
        match command.name:
            case "leave":
                self.prefixes = dict(map(self._prefix, command.body))
                self.plan = HandOver([*self.prefixes.values()], options["successors"].split(","))
            case "next":
                names = {id(prefix): name for name, prefix in self.prefixes.items()}
                offer = self.plan.next()
                yield "nothing now" if offer is None else f"{names[id(offer[0])]} is offered to {offer[1]}"
            case "taken":
                held, room = int(options["held"]), int(options["room"])
                more = self.plan.taken(self.prefixes[words[0]], held, room)
                yield f"{more} tokens more are handed over"
            case "no_room" | "busy":
                getattr(self.plan, command.name)(self.prefixes[words[0]])
            case "failed":
                self.plan.failed(self.prefixes[words[0]], is_out=False)
            case "rested":
                self.plan.rested(words[0])
            case "end":
                self.plan.end()
        yield f"handed {self.plan.outcome.handed_tokens}, left {self.plan.outcome.left_tokens}"

    def _prefix(self, line):
        name, *rest = line.split()
        told = {key: int(value) for key, value in (word.split("=") for word in rest)}
        return name, IdlePrefix(ROOT, "", told["tokens"], told.get("protected", 0), float(told["idle"]))


@pytest.mark.parametrize("path", transcripts_beside(__file__), ids=stem)
def test_stories(path, play):
    play(path, Stories().perform)


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
        ages = {other: age for other, age in ages.items() if other not in gone}
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
