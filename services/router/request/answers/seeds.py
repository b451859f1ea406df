"""Each answer's seed, drawn from the request's. Pure."""

_64_BITS = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15


def seed_of(seed: int, index: int) -> int:
    """The first answer's is the request's own, so that it is the answer to n = 1. That of answer i is the
    i-th number of SplitMix64 from there: no two of them are the same.

    https://prng.di.unimi.it/splitmix64.c
    """
    if index == 0:
        return seed
    mixed = (seed + index * _STEP) & _64_BITS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64_BITS
    return mixed ^ mixed >> 31
