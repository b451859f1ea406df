"""It is kept here how much of a model was fused, and whether that is on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Fused:
    """A model computes what its definition says while this is off."""

    is_on: bool = True
    num_products: int = 0
    num_norms: int = 0
    num_rotations: int = 0
    num_activations: int = 0

    def __bool__(self) -> bool:
        counts = (self.num_products, self.num_norms, self.num_rotations, self.num_activations)
        return self.is_on and any(counts)

    def undo(self) -> None:
        """Turn it off for good. Weights stay where they are, and are read part by part."""
        self.is_on = False

    @contextmanager
    def as_defined(self) -> Iterator[None]:
        was_on, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = was_on
