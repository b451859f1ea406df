"""Token ids that only their seed decides."""

import random


def random_ids(count, seed):
    return [random.Random(f"{seed}/{i}").randrange(2, 500) for i in range(count)]
