"""A layer makes weights of products of queries and keys."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """A score is query * key * scaling, then, with a soft cap c, tanh(score / c) * c; then comes the mask.

    Their softmax has, of each head that has a sink, one score more that has no value: it only takes weight.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]

    @property
    def are_plain(self) -> bool:
        return self.softcap is None and self.sinks is None
