import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numba import njit

from services.engine.torch.vector_lanes import (
    HAS_FLOAT16,
    add,
    exp,
    greater,
    load,
    multiply,
    multiply_rows,
    store,
    subtract,
    width_of,
    zeros,
)

WIDTH = 8


@njit
def compute(x, y, sums, differences, products, greatest, exponentials):
    zero = zeros(8)
    for i in range(0, len(x), width_of(zero)):
        left, right = load(x, i, zero), load(y, i, zero)
        store(sums, i, add(left, right))
        store(differences, i, subtract(left, right))
        store(products, i, multiply(left, right))
        store(greatest, i, greater(left, right))
        store(exponentials, i, exp(left))


def computed(x, y):
    results = [np.empty_like(x) for _ in range(5)]
    compute(x, y, *results)
    return results


finite = st.floats(-1e6, 1e6, width=32)


@given(x=arrays.arrays(np.float32, 16, elements=finite), y=arrays.arrays(np.float32, 16, elements=finite))
def test_each_lane_is_computed_by_itself(x, y):
    sums, differences, products, greatest, _ = computed(x, y)
    assert np.array_equal(sums, x + y)
    assert np.array_equal(differences, x - y)
    assert np.array_equal(products, x * y)
    assert np.array_equal(greatest, np.maximum(x, y))


def test_rows_and_exponentials(subtests):
    with subtests.test("exp is that of numpy"):
        x = np.concatenate([np.linspace(-87, 88, 1 << 20), np.linspace(-1e-3, 1e-3, 1 << 12)]).astype(
            np.float32
        )
        exponentials = computed(x, x)[-1]
        np.testing.assert_allclose(exponentials, np.exp(x.astype(np.float64)), rtol=2e-7)
    with subtests.test("exp of what is no number and of what is far below"):
        x = np.array([np.nan, -np.inf, -1e30, -88, 0, -0.0, 1, np.nan], np.float32)
        exponentials = computed(x, x)[-1]
        assert np.isnan(exponentials[[0, 7]]).all()
        assert (exponentials[1:4] < 2e-38).all()
        assert (exponentials[4:6] == 1).all()
    with subtests.test("who is greater than nan"):
        nan, one = np.full(WIDTH, np.nan, np.float32), np.ones(WIDTH, np.float32)
        assert (computed(nan, one)[3] == one).all()
        assert np.isnan(computed(one, nan)[3]).all()
    for num_columns, dtype, is_transposed in itertools.product(
        [0, 1, 2, 11], ["float32", "bfloat16", "float16", "float8"], [False, True]
    ):
        with subtests.test(
            "rows of a product", num_columns=num_columns, dtype=dtype, is_transposed=is_transposed
        ):
            if dtype == "float16" and not HAS_FLOAT16:
                pytest.skip("this processor does not know float16")
            rng = np.random.default_rng(num_columns)
            numbers = rng.standard_normal(9 * 13).astype(np.float32)
            matrix = numbers
            if dtype == "float16":
                numbers[:3] = (
                    2.0**-24,
                    -6.1e-5,
                    -65504,
                )  # the least there is, another that is not normal, the greatest
                matrix = numbers.astype(np.float16).view(np.int16)
                numbers = matrix.view(np.float16).astype(np.float32)
            if dtype == "bfloat16":
                matrix = (numbers.view(np.uint32) >> 16).astype(np.uint16)
                numbers = (matrix.astype(np.uint32) << 16).view(np.float32)
            if dtype == "float8":
                finite_bits = [bits for bits in range(256) if bits & 0x7F != 0x7F]
                matrix = rng.choice(np.array(finite_bits, np.uint8), 9 * 13)
                matrix[:4] = (
                    0x01,
                    0x87,
                    0x7E,
                    0xFE,
                )  # the least, another that is not normal, the greatest ones
                numbers = torch.from_numpy(matrix).view(torch.float8_e4m3fn).float().numpy()
            strides = (1, 9) if is_transposed else (13, 1)
            rows = rng.standard_normal(20 * WIDTH).astype(np.float32)
            kept = rng.standard_normal(WIDTH).astype(np.float32)
            expected = rows.reshape(20, WIDTH).copy()
            of_row = [
                [numbers[2 + i * strides[0] + k * strides[1]] for k in range(num_columns)] for i in range(5)
            ]
            expected[12:17] *= kept
            expected[12:17] += np.reshape(of_row, (5, num_columns)) @ expected[1 : 1 + num_columns]
            five_rows(matrix, 2, strides, num_columns, rows, WIDTH, 12 * WIDTH, kept)
            atol = 2e-3 if dtype == "float8" else 2e-6  # its numbers are up to 448
            np.testing.assert_allclose(rows.reshape(20, WIDTH), expected, atol=atol, rtol=1e-6)


@njit
def five_rows(matrix, first, strides, num_columns, rows, factors, products, kept):
    lanes = load(kept, 0, zeros(8))
    multiply_rows(5, matrix, first, strides, num_columns, rows, factors, products, lanes, 0)
