"""One product computes all linear layers that get the same tensor.

A pass of a few tokens shows which these are (q, k and v; gate and up; a mixer's projections), whatever their
names. Their weights lie one after another in one parameter of the model, and nowhere else, so widening or
moving the model's parameters includes them.

The first layer that is called computes the product, and the others take their columns of it. A layer that
gets another tensor, or is called out of order, computes its own part. So each layer's output is right, unless
a definition changes the tensor in place between two layers; a definition that does so in that pass is not
merged.

Fused counts what was fused in a model, and has the switch.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from services.engine.torch.model.model_probe import probe

if TYPE_CHECKING:
    from services.engine.torch.model.fused.residuals import Residuals


@dataclass
class Fused:
    """A model computes exactly its definition while this is off."""

    is_on: bool = True
    num_products: int = 0
    num_norms: int = 0
    num_rotations: int = 0
    num_activations: int = 0
    adds: bool = False  # Norms also compute the sums that they get, in steps that are captured.
    residuals: "Residuals | None" = None  # It is set during such a pass.

    def __bool__(self) -> bool:
        counts = (self.num_products, self.num_norms, self.num_rotations, self.num_activations)
        return self.is_on and any(counts)

    def undo(self) -> None:
        """Turn it off for good. The weights stay merged, and are read part by part."""
        self.is_on = False

    @contextmanager
    def as_defined(self) -> Iterator[None]:
        was_on, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = was_on


# The columns of a layer begin at multiples of this, so that the rows of its part are aligned as kernels and
# cuBLAS want them (16 bytes in half precision).
_ALIGNMENT = 8


def merge_products(model: PreTrainedModel, fused: Fused, kept: Collection[nn.Module] = ()) -> None:
    """Merge linear layers where possible, except those in `kept`, whose weights other modules read."""
    for members in shared_inputs(model, kept):
        Product(fused, members)
        fused.num_products += 1
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # This frees the memory of the original weights.


def shared_inputs(model: PreTrainedModel, kept: Collection[nn.Module] = ()) -> list[list[nn.Linear]]:
    """Return groups of two or more layers in the order of their calls."""
    calls: dict[nn.Linear, list[Tensor]] = {}
    firsts: dict[int, Tensor] = {}  # These are copies of tensors as the first layer got them.
    changed: set[nn.Module] = set()

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        # References to the tensors are kept, since another tensor could get the same id otherwise.
        tensor = given[0] if given else None
        calls.setdefault(module, []).append(tensor)
        if isinstance(tensor, Tensor):
            first = firsts.setdefault(id(tensor), tensor.clone())
            if not torch.allclose(tensor, first, rtol=0, atol=0, equal_nan=True):
                changed.add(module)

    with ExitStack() as hooks:
        for module in _own_linears(model, kept):
            hooks.callback(module.register_forward_pre_hook(note).remove)
        probe(model)
    groups: dict[tuple[object, ...], list[nn.Linear]] = {}
    for module, tensors in calls.items():
        if module not in changed and all(isinstance(tensor, Tensor) for tensor in tensors):
            key = (*map(id, tensors), module.in_features, module.weight.dtype, module.weight.device)
            groups.setdefault(key, []).append(module)
    return [group for group in groups.values() if len(group) > 1]


def _own_linears(model: nn.Module, kept: Collection[nn.Module]) -> Iterator[nn.Linear]:
    """Yield layers that share no weight; some are tied to an embedding."""
    owners = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    for module in model.modules():
        is_its_own = all(owners[id(each)] == 1 for each in module.parameters(recurse=False))
        if type(module) is nn.Linear and module not in kept and is_its_own:
            yield module


class Product:
    """The first member's call computes it, and it is dropped when the last member has taken its columns."""

    def __init__(self, fused: Fused, members: Sequence[nn.Linear]) -> None:
        self._fused = fused
        with torch.no_grad():
            self._weight = nn.Parameter(_stacked([each.weight for each in members]), requires_grad=False)
            biases = [
                each.weight.new_zeros(each.out_features) if each.bias is None else each.bias
                for each in members
            ]
            has_bias = any(each.bias is not None for each in members)
            self._bias = nn.Parameter(_stacked(biases), requires_grad=False) if has_bias else None
        self._members, self._owner = tuple(members), members[0]
        self._computes: Callable[[Tensor], Tensor] | None = None
        members[0].register_parameter("merged_weight", self._weight)
        members[0].register_parameter("merged_bias", self._bias)
        self._everyone = frozenset(range(1, len(members)))
        self._waiting: set[int] = set()  # These members have not taken their columns.
        self._given: Tensor | None = None
        self._columns: Tensor | None = None
        begin = 0
        for index, member in enumerate(members):
            _make_member(member, self, index, begin)
            begin += _aligned(member.out_features)

    @property
    def whole_bias(self) -> Tensor | None:
        return self._bias

    def __call__(self, given: Tensor) -> Tensor:
        """Return the columns of all members, and the padding between them."""
        return linear(given, self._weight, self._bias) if self._computes is None else self._computes(given)

    def compute_by(self, computes: Callable[[Tensor], Tensor]) -> None:
        """Compute the columns with `computes` from now on, and free the weight.

        It computes those of all members, whether the model is fused or not.
        """
        self._computes = computes
        self._weight = self._owner.merged_weight = nn.Parameter(
            self._weight.new_empty(0, self._weight.shape[1]), requires_grad=False
        )

    def split(self) -> None:
        assert self._computes is None, "the weight was given up"
        for member in self._members:
            _make_plain(member)
        del self._owner.merged_weight, self._owner.merged_bias
        self._given = self._columns = None
        self._fused.num_products -= 1

    def _part(self, given: Tensor, begin: int, size: int) -> Tensor:
        if self._computes is not None:
            return self._computes(given).narrow(-1, begin, size)
        return linear(given, self.weight(begin, size), self.bias(begin, size))

    def weight(self, begin: int, size: int) -> Tensor:
        return self._weight[begin : begin + size]

    def bias(self, begin: int, size: int) -> Tensor | None:
        return None if self._bias is None else self._bias[begin : begin + size]

    def part(self, given: Tensor, index: int, begin: int, size: int) -> Tensor:
        if self._computes is None and not self._fused.is_on:
            return self._part(given, begin, size)
        if index == 0:
            self._given, self._columns = given, self(given)
            self._waiting = set(self._everyone)
        elif self._given is not given or index not in self._waiting:
            return self._part(given, begin, size)
        else:
            self._waiting.remove(index)
        assert self._columns is not None
        columns = self._columns.narrow(-1, begin, size)
        if not self._waiting:
            self._given = self._columns = None
        return columns


class ProductPart(nn.Linear):
    product: Product
    index: int
    begin: int

    @property
    def weight(self) -> Tensor:
        return self.product.weight(self.begin, self.out_features)

    @property
    def bias(self) -> Tensor | None:
        return self.product.bias(self.begin, self.out_features)

    def forward(self, input: Tensor) -> Tensor:
        return self.product.part(input, self.index, self.begin, self.out_features)


def _make_member(linear: nn.Linear, product: Product, index: int, begin: int) -> None:
    """Change the module's class in place, since others hold a reference to it."""
    del linear.weight, linear.bias
    linear.__class__ = ProductPart
    linear.product, linear.index, linear.begin = product, index, begin


def _make_plain(linear: nn.Linear) -> None:
    weight, bias = linear.weight.clone(), linear.bias
    linear.__class__ = nn.Linear
    del linear.product, linear.index, linear.begin
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias.clone(), False))


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    sizes = [_aligned(len(part)) for part in parts]
    whole = first.new_zeros(sum(sizes), *first.shape[1:])
    for part, place in zip(parts, whole.split(sizes), strict=True):
        place[: len(part)] = part
    return whole


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
