"""SGLang's radix tree, as far as its events matter: pages of keys, each below the ones before it. With EAGLE
a key is a pair of neighbouring tokens, else a token."""

from itertools import pairwise


def name(keys):
    """Any function of all keys so far would do."""
    return hash(keys)


class KeyTree:
    def __init__(self, page_size, paired=True):
        self.page_size, self.paired = page_size, paired
        self.pages = set()  # each as all keys up to its end

    def insert(self, ids):
        return [self.stored(page) for page in self.pages_of(ids) if not self.holds(page)]

    def holds(self, page):
        known = page in self.pages
        self.pages.add(page)
        return known

    def stored(self, page):
        parent, keys = page[: -self.page_size], page[-self.page_size :]
        return {
            "type": "BlockStored",
            "block_hashes": [name(page)],
            "parent_block_hash": name(parent) if parent else None,
            "token_ids": [list(key) for key in keys] if self.paired else list(keys),
            "block_size": self.page_size,
            "medium": "GPU",
        }

    def evict(self, number):
        """One of its leaves."""
        leaves = sorted(self.pages - {page[: -self.page_size] for page in self.pages})
        if not leaves:
            return []
        page = leaves[number % len(leaves)]
        self.pages.remove(page)
        return [{"type": "BlockRemoved", "block_hashes": [name(page)], "medium": "GPU"}]

    def matched(self, ids):
        """Keys, each of them a token's KV."""
        return max((len(page) for page in self.pages_of(ids) if page in self.pages), default=0)

    def pages_of(self, ids):
        keys = tuple(pairwise(ids)) if self.paired else tuple(ids)
        size = self.page_size
        return [keys[:end] for end in range(size, len(keys) + 1, size)]
