import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.torch.linear_kernel import multiply, pack

# So that a sum of float32 products is exact, in whatever order: small whole numbers.
_GREATEST = 8


def whole_numbers(rng, *shape):
    return rng.integers(-_GREATEST, _GREATEST + 1, shape).astype(np.float32)


@settings(deadline=None)
@given(
    num_rows=st.integers(0, 220),
    num_columns=st.integers(1, 100),
    depth=st.integers(1, 70),
    biased=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_every_product_is_exact(num_rows, num_columns, depth, biased, seed):
    rng = np.random.default_rng(seed)
    rows, weight = whole_numbers(rng, num_rows, depth), whole_numbers(rng, num_columns, depth)
    bias = whole_numbers(rng, num_columns) if biased else None
    got = multiply(rows, pack(weight, bias))
    assert np.array_equal(got, rows @ weight.T + (0 if bias is None else bias))


def test_a_row_is_the_same_whatever_it_is_beside_or_a_view_of(subtests):
    # To the last bit: what a request gets does not depend on its batch.
    for num_rows in [1, 13, 150]:
        with subtests.test("a row is the same among whatever others", num_rows=num_rows):
            rng = np.random.default_rng(2)
            rows = rng.standard_normal((num_rows, 300), np.float32)
            panels = pack(rng.standard_normal((90, 300), np.float32), None)
            alone = np.concatenate([multiply(row[None], panels) for row in rows])
            assert np.array_equal(multiply(rows, panels), alone)
    with subtests.test("a view of rows is as good as a copy"):
        rng = np.random.default_rng(1)
        panels, rows = pack(whole_numbers(rng, 40, 24), None), whole_numbers(rng, 24, 30)
        assert np.array_equal(multiply(rows.T, panels), multiply(rows.T.copy(), panels))
