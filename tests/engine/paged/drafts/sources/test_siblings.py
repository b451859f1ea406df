"""These tests show what the radix tree has behind the very same ids: against all that was put into it."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.paged.draft_sources import Siblings
from services.kv.radix_tree import RadixTree

PAGE = 4
TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=PAGE, max_size=5 * PAGE), max_size=4)


class Tree:
    def __init__(self):
        self.tree, self.pages = RadixTree(PAGE, PAGE, "m"), iter(range(10**6))

    def insert(self, ids, salt=""):
        """Whole pages of them; returns the deepest node."""
        whole = ids[: len(ids) // PAGE * PAGE]
        pages = [next(self.pages) for _ in range(len(whole) // PAGE)]
        return self.tree.insert(self.tree.root(salt), whole, pages).node


@given(
    texts=TEXTS, ids=st.lists(st.integers(0, 1), min_size=1, max_size=3 * PAGE), published=st.integers(0, 3)
)
def test_it_is_what_some_text_goes_on_with_after_the_same_ids(texts, ids, published):
    tree = Tree()
    under = tree.insert(ids[: published * PAGE])
    for text in texts:
        tree.insert(text)
    match = Siblings(ids, PAGE, lambda: under).match(3)
    whole = [text[: len(text) // PAGE * PAGE] for text in texts]
    going_on = [text[len(ids) :] for text in whole if text[: len(ids)] == ids and len(text) > len(ids)]
    assert (match is not None) == bool(going_on)
    if match is not None:
        assert any(text[: len(match.ids)] == list(match.ids) for text in going_on)
        assert len(match.ids) <= 3


def test_which_text_is_followed(subtests):
    with subtests.test("who was followed is followed on and the latest otherwise"):
        tree, ids = Tree(), [1]
        siblings = Siblings(ids, PAGE, lambda: tree.tree.root(""))

        def goes_on(ids_now):
            ids[:] = ids_now
            match = siblings.match(3)
            return list(match.ids) if match is not None else None

        assert goes_on([1]) is None
        tree.insert([1, 2, 3, 4])
        assert goes_on([1]) == [2, 3, 4]
        tree.insert([1, 2, 5, 6])
        assert goes_on([1, 2]) == [3, 4]
        assert goes_on([1, 2, 5]) == [6]
        assert goes_on([1, 2, 9]) is None
        tree.insert([1, 2, 9, 7])
        assert goes_on([1, 2, 9]) == [7]

    with subtests.test("it reads on into the pages behind"):
        tree = Tree()
        under = tree.insert([1, 2, 3, 4])
        tree.insert([*range(1, 13)])
        assert list(Siblings([*range(1, 8)], PAGE, lambda: under).match(5).ids) == [8, 9, 10, 11, 12]

    with subtests.test("only those of the same salt"):
        tree = Tree()
        tree.insert([1, 2, 3, 4], salt="other")
        assert Siblings([1], PAGE, lambda: tree.tree.root("own")).match(3) is None

    with subtests.test("without a cache there is nothing"):
        assert Siblings([1], PAGE, lambda: None).match(3) is None
