import itertools
from contextlib import contextmanager
from functools import wraps

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from services.engine.torch.model.activations import even, even_activations, even_size


@given(size=st.integers(1, 1 << 20), num_threads=st.integers(1, 100))
def test_every_thread_has_whole_steps(size, num_threads):
    filled = even_size(size, num_threads)
    assert size <= filled < size + 64 * num_threads
    # As at::parallel_for shares numbers among threads, 32,768 at least to each.
    count = min(num_threads, -(-filled // 32768))
    share = -(-filled // count)
    ends = [min(nth * share, filled) for nth in range(1, count + 1)]
    assert all(end % 64 == 0 for end in ends)


ACTIVATIONS = [
    functional.silu,
    functional.softplus,
    torch.sigmoid,
    lambda x: functional.gelu(x, approximate="tanh"),
]


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def test_a_row_is_the_same_among_whatever_others(subtests):
    for activation, width, dtype, num_threads in itertools.product(
        ACTIVATIONS, [4, 24, 96, 1408], [torch.float32, torch.bfloat16], [1, 3]
    ):
        with (
            subtests.test(activation=activation, width=width, dtype=dtype, num_threads=num_threads),
            threads(num_threads),
        ):
            rows = (3 * torch.randn(70, width, generator=torch.Generator().manual_seed(0))).to(dtype)
            activation = even(activation)
            alone = torch.cat([activation(row[None]) for row in rows])
            for count in (2, 7, 33, 70):
                assert torch.equal(activation(rows[:count]), alone[:count])
            with_gaps = torch.zeros(70, 2 * width, dtype=dtype)[:, :width].copy_(rows)
            assert torch.equal(activation(with_gaps), alone)


def renamed(old, new):
    """A decorator as transformers' deprecate_kwarg."""

    def decorate(function):
        @wraps(function)
        def with_new_name(*args, **kwargs):
            return function(*args, **{new if name == old else name: kwargs[name] for name in kwargs})

        return with_new_name

    return decorate


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.act_fn = nn.SiLU()
        self.other = nn.Linear(5, 5)

    def forward(self, x, *, softly=False):
        return functional.softplus(input=x) if softly else torch.sigmoid(self.act_fn(x))


def test_a_models_activations_are_made_even(subtests):
    with subtests.test("all of a models activations are made even"):
        model, rows = nn.Sequential(Gate()), torch.randn(7, 5)
        plain = model(rows), model[0](rows, softly=True)
        even_activations(model)
        for softly, expected in enumerate(plain):
            got = model[0](rows, softly=bool(softly))
            torch.testing.assert_close(got, expected)
            alone = torch.cat([model[0](row[None], softly=bool(softly)) for row in rows])
            assert torch.equal(got, alone)
    with subtests.test("a decorated forward is made even and stays decorated"):
        gate = DecoratedGate()
        rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
        plain = [gate(rows), gate(rows, gently=True), gate(rows, smoothly=True)]
        even_activations(gate)
        made_even = [gate(rows), gate(rows, gently=True), gate(rows, smoothly=True)]
        torch.testing.assert_close(made_even, plain)
        alone = torch.cat([gate(row[None], smoothly=True) for row in rows])
        assert torch.equal(made_even[2], alone)
        assert type(gate).forward.__wrapped__.__wrapped__.__globals__["torch"] is torch
        assert gate.forward.__wrapped__.__wrapped__.__globals__["torch"] is not torch


class DecoratedGate(Gate):
    @renamed("smoothly", "softly")
    @renamed("gently", "softly")
    def forward(self, x, *, softly=False):
        return functional.softplus(x) if softly else torch.sigmoid(x)
