import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from services.engine.torch.model.recurrence_kernel import Runs, delta_rule, mamba2

STRIDE, OFFSET = 7000, 16  # numbers of a slot, and before the state in it


@pytest.fixture(scope="module")
def executor():
    with ThreadPoolExecutor(1) as threads:
        yield threads


def random_arrays(seed, *shapes):
    chance = np.random.default_rng(seed)
    return [chance.standard_normal(shape).astype(np.float32) for shape in shapes]


def pool(seed, num_slots=6):
    return random_arrays(seed, num_slots * STRIDE)[0]


def singles(starts):
    """A token each."""
    tokens = np.arange(len(starts))
    return Runs(starts, tokens, tokens + 1, np.zeros(len(starts), bool))


def states_of(numbers, starts, *shape):
    size = int(np.prod(shape))
    return np.stack([numbers[start : start + size].reshape(shape) for start in starts]).astype(np.float64)


SHARES = [[range(9)], [range(0, 4), range(4, 9)], [range(0), range(9)]]


def test_the_kernels_compute_what_they_say(subtests, executor):
    # Three sequences of three heads.
    for (d_k, d_v), shares in itertools.product([(16, 16), (5, 7), (64, 32)], SHARES):
        with subtests.test("the delta rule is what it says", d_k=d_k, d_v=d_v, shares=shares):
            numbers, starts = pool(1), np.array([4, 0, 2]) * STRIDE + OFFSET
            before = numbers.copy()
            query, key, value, decay, beta = random_arrays(
                2, (3, 3, d_k), (3, 3, d_k), (3, 3, d_v), (3, 3), (3, 3)
            )
            decay = np.exp(-np.abs(decay))
            states = states_of(numbers, starts, 3, d_k, d_v) * decay[..., None, None]
            change = (value - np.einsum("mhk,mhkv->mhv", key, states)) * beta[..., None]
            expected = states + key[..., None] * change[..., None, :]
            output = delta_rule(
                numbers, singles(starts), query, key, value, decay, beta, shares=shares, executor=executor
            )
            np.testing.assert_allclose(
                output, np.einsum("mhk,mhkv->mhv", query, expected), rtol=1e-4, atol=1e-4
            )
            np.testing.assert_allclose(
                states_of(numbers, starts, 3, d_k, d_v), expected, rtol=1e-4, atol=1e-4
            )
            assert_nothing_else_is_written(before, numbers, starts, 3 * d_k * d_v)
    # Three sequences of four heads, which share B and C by groups.
    for groups, shares in itertools.product([1, 2, 4], [[range(12)], [range(0, 5), range(5, 12)]]):
        with subtests.test("mamba2 is what it says", groups=groups, shares=shares):
            numbers, starts = pool(3), np.array([1, 5, 3]) * STRIDE + OFFSET
            before = numbers.copy()
            inputs, decay, b, c = random_arrays(4, (3, 4, 8), (3, 4), (3, groups, 16), (3, groups, 16))
            decay = np.exp(-np.abs(decay))
            of_heads = [np.repeat(part, 4 // groups, axis=1) for part in (b, c)]
            expected = states_of(numbers, starts, 4, 8, 16) * decay[..., None, None]
            expected += inputs[..., None] * of_heads[0][:, :, None]
            output = mamba2(numbers, singles(starts), inputs, decay, b, c, shares=shares, executor=executor)
            np.testing.assert_allclose(
                output, np.einsum("mhpn,mhn->mhp", expected, of_heads[1]), rtol=1e-4, atol=1e-4
            )
            np.testing.assert_allclose(states_of(numbers, starts, 4, 8, 16), expected, rtol=1e-4, atol=1e-4)
            assert_nothing_else_is_written(before, numbers, starts, 4 * 8 * 16)


def assert_nothing_else_is_written(before, after, starts, size):
    others = np.ones(len(before), bool)
    for start in starts:
        others[start : start + size] = False
    assert (before[others] == after[others]).all()
