"""All that an index holds."""

from services.index.read.block_holders import columns_of
from services.index.read.prefix_index import PrefixIndex
from services.values.rank import RankKey


def contents_of(index: PrefixIndex) -> dict[int, set[RankKey]]:
    """By block, the ranks that hold it."""
    index.take_in()
    table, masks = index._holders._table, index._holders._sets.masks
    rows = zip(table._keys.ravel().tolist(), table._numbers.ravel().tolist(), strict=True)
    numbers = {block: number for block, number in rows if number}
    for beside in table._over.values():
        numbers |= beside
    holders = {
        block: {index._keys[column] for column in columns_of(masks[number]) if column in index._keys}
        for block, number in numbers.items()
    }
    return {block: ranks for block, ranks in holders.items() if ranks}
