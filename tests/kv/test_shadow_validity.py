"""What is said to be valid is compared with what really lies in each slot."""

import random

from services.kv.shadow_validity import ShadowValidity

PAGE = 4


def shadow(num_pages=8):
    return ShadowValidity(num_pages, PAGE)


def test_pages_are_valid_as_far_as_they_were_computed():
    validity = shadow()
    assert validity.valid_len([3, 5]) == 0
    validity.computed([3, 5], 0, 6)
    assert validity.valid_len([3, 5]) == 6
    assert validity.valid_len([3]) == 4
    assert validity.valid_len([3, 5, 1]) == 6


def test_a_page_lent_anew_has_nothing():
    validity = shadow()
    validity.computed([3, 5, 6], 0, 12)
    validity.lent([5])
    assert validity.valid_len([3, 5, 6]) == 4
    assert validity.valid_len([3, 6]) == 8


def test_what_was_received_counts_from_the_first_page_on():
    validity = shadow()
    validity.computed([2], 0, 4)
    validity.received([4, 7], 5)
    assert validity.valid_len([2, 4, 7]) == 9
    assert validity.valid_len([1, 4, 7]) == 0


def test_a_chunk_is_computed_where_all_is_there_that_comes_before():
    validity = shadow()
    assert list(validity.lacking([0, 1, 2], 4, 9)) == []
    assert list(validity.lacking([0, 1, 2], 0, 9)) == list(range(9))
    validity.computed([0, 1, 2], 0, 6)
    assert list(validity.lacking([0, 1, 2], 4, 9)) == [6, 7, 8]
    assert list(validity.lacking([0, 1], 2, 5)) == []


def test_drafts_that_come_true_need_not_be_computed():
    validity = shadow()
    validity.computed([0, 1], 0, 3)
    validity.foreseen([0, 1], 3, [11, 12, 13])
    assert validity.settle([0, 1], [7, 8, 9, 11, 12, 99]) == 5
    assert validity.valid_len([0, 1]) == 5
    assert validity.settle([0, 1], [7, 8, 9, 11, 12, 13]) == 5  # they are asked about once


def test_drafts_past_the_pages_are_not_kept():
    validity = shadow()
    validity.computed([0], 0, 3)
    validity.foreseen([0], 3, [11, 12])
    assert validity.settle([0, 1], [7, 8, 9, 11, 12, 13]) == 4
    validity.foreseen([0, 1], 8, [5])
    assert repr(validity) == "ShadowValidity(tokens=4 foreseen=0)"


def test_drafts_of_who_had_the_page_before_are_nobodys():
    validity = shadow()
    validity.computed([0, 1], 0, 5)
    validity.foreseen([0, 1], 5, [11, 12])
    validity.lent([1])
    validity.computed([0, 1], 4, 5)
    assert validity.settle([0, 1], [7, 8, 9, 4, 5, 11, 12]) == 5


def test_who_lacks_least_comes_first():
    validity = shadow()
    validity.computed([0, 1, 2], 0, 9)
    sequences = [([3, 4, 5], list(range(12))), ([0, 1, 2], list(range(11))), ([6, 7], list(range(5)))]
    assert validity.to_compute(sequences, 10) == [range(3), range(9, 11), range(5)]
    assert validity.to_compute(sequences[1:2], 10) == [range(9, 11)]


def test_the_last_id_is_computed_again_for_what_follows_it():
    validity = shadow()
    validity.computed([0], 0, 4)
    assert validity.to_compute([([0], [1, 2, 3, 4])], 10) == [range(3, 4)]


class Slots:
    """Who computes says what a slot is of: all ids up to there."""

    def __init__(self):
        self.of = {}

    def store(self, pages, start, ids):
        for position in range(start, len(ids)):
            if position // PAGE < len(pages):
                self.of[pages[position // PAGE], position % PAGE] = tuple(ids[: position + 1])

    def valid_len(self, pages, ids):
        for position in range(min(len(ids), len(pages) * PAGE)):
            if self.of.get((pages[position // PAGE], position % PAGE)) != tuple(ids[: position + 1]):
                return position
        return min(len(ids), len(pages) * PAGE)


def test_drafting_never_takes_anothers_slots_for_its_own(subtests):
    """Two sequences come and go, draft, are right or wrong. (What is right by luck is computed again.)"""
    for seed in range(40):
        with subtests.test(seed=seed):
            two_sequences_draft(random.Random(seed))


def two_sequences_draft(chance):
    validity, slots, sequences = ShadowValidity(8, PAGE), Slots(), [None, None]
    for _ in range(60):
        which = chance.randrange(2)
        if sequences[which] is None or chance.random() < 0.1:
            pages = chance.sample(range(4 * which, 4 * which + 4), 4)
            validity.lent(pages)
            slots.of = {slot: ids for slot, ids in slots.of.items() if slot[0] not in pages}
            sequences[which] = (pages, some_ids(chance, chance.randint(1, 5)))
        pages, ids = sequences[which]
        [lacking] = validity.to_compute([(pages, ids)], chance.choice([2, 100]))
        assert lacking.start <= min(slots.valid_len(pages, ids), len(ids) - 1)
        slots.store(pages, lacking.start, ids[: lacking.stop])
        validity.computed(pages, lacking.start, lacking.stop)
        if lacking.stop == len(ids) and len(ids) < 3 * PAGE:
            drafts = some_ids(chance, chance.randint(0, 4))
            held = pages[: chance.randint(-(-len(ids) // PAGE), 4)]
            slots.store(held, len(ids), [*ids, *drafts])
            validity.foreseen(held, len(ids), drafts)
            right = chance.randint(0, len(drafts))
            sequences[which] = (pages, [*ids, *drafts[:right], *some_ids(chance, 1)])


def some_ids(chance, count):
    return [chance.randrange(3) for _ in range(count)]
