"""Linear layers multiply floats of 8 bits on a GPU: half the bytes of a weight are read, at twice the rate.

Their numbers are those of the checkpoint, or they are rounded when the runner starts. A row of activations is
rounded by scales of its own, so its product does not depend on what else is in the step. That changes what a
layer gives by some 2.6 % (three bits behind the point), and rounding a weight does as much. Each layer is
tried beside the one that it replaces, and left out where it cannot compute or is off by more.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.torch.model.fused.products import Product, ProductPart
from services.engine.torch.quantized.dequantize import scaled
from services.engine.torch.quantized.float8_products import (
    BLOCK,
    STEP,
    BlockProduct,
    BlockWeight,
    Round,
    RowProduct,
    RowWeight,
    round_groups_plainly,
    round_rows_plainly,
)
from services.engine.torch.quantized.parts import Dequantized, Stored, float8_block

log = logging.getLogger(__name__)

WeightsForm = Literal["dequantized", "fp8"]
Float8Product = RowProduct | BlockProduct

# Rounding explains 2.6 % or 3.7 %; a lost scale, or rows of another order, change all of it.
_TOLERANCE = 0.08
_TRIED_ROWS = (1, 17, 200)
_ROW_STEPS = (1, 4, 16)  # cuBLAS may want so many rows, or a multiple.


class Float8Linear(nn.Linear):
    """This layer keeps no weight in the served dtype."""

    product: Float8Product

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input)


@dataclass(frozen=True, slots=True)
class Rounding:
    rows: Round = round_rows_plainly
    groups: Round = round_groups_plainly


@torch.no_grad()
def compute_in_float8(
    model: PreTrainedModel,
    kept: Collection[nn.Module],
    stored: Mapping[str, Stored | Dequantized] | None = None,
) -> int:
    """Let products of linear layers be computed so, but those that are `kept`, and return how many.

    They are those whose numbers are such floats in `stored`, a checkpoint's weights by their names; or, where
    it is None, all but the head. One that is off stays, and so do all after one that cannot compute.
    """
    if stored is None:
        kept = {*kept, model.get_output_embeddings()}
    numbers, ways = _Numbers(stored), _Ways(rounding_on(next(model.parameters()).device))
    count = 0
    for members in _products(model, kept):
        first = members[0][1]
        whole = first.product if isinstance(first, ProductPart) else first
        weight = numbers.of(members)
        if weight is None or (product := ways.product(weight, whole, members[0])) is None:
            continue
        if isinstance(whole, Product):
            whole.compute_by(product)
        else:
            _replace(whole, product)
        count += 1
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the memory of the weights that were replaced
    log.info("float8_products count=%d", count)
    return count


class _Ways:
    """It makes products of weights, and remembers which way to make them a device cannot go."""

    def __init__(self, rounding: Rounding) -> None:
        self._rounding = rounding
        self._row_steps = list(_ROW_STEPS)
        self._rows_fail = False

    def product(
        self, weight: RowWeight | BlockWeight, whole: Product | nn.Linear, first: tuple[str, nn.Linear]
    ) -> Float8Product | None:
        """Return what computes as `whole` does up to rounding, or None where nothing does."""
        name, dtype = first[0], first[1].weight.dtype
        for product in self._products(weight, _bias_of(whole, weight.num_rows)):
            try:
                error = max(_error(product, whole, dtype, num_rows) for num_rows in _TRIED_ROWS)
            except Exception as raised:  # torch refuses what this device, or its library, cannot compute
                log.warning("float8_unusable layer=%s error=%r", name, raised)
                self._give_up(product)
                continue
            if error <= _TOLERANCE:  # NaN is more
                return product
            log.warning("float8_unusable layer=%s off=%.2g of=%.2g", name, error, _TOLERANCE)
        return None

    def _products(self, weight: RowWeight | BlockWeight, bias: Tensor | None) -> Iterator[Float8Product]:
        if isinstance(weight, BlockWeight):
            for step in tuple(self._row_steps):
                yield BlockProduct(weight, bias, self._rounding.groups, step)
        elif not self._rows_fail:
            yield RowProduct(weight, bias, self._rounding.rows)

    def _give_up(self, product: Float8Product) -> None:
        if isinstance(product, BlockProduct):
            self._row_steps.remove(product.row_step)
        else:
            self._rows_fail = True


class _Numbers:
    """The numbers of weights are those of a checkpoint, or rounded now."""

    def __init__(self, stored: Mapping[str, Stored | Dequantized] | None) -> None:
        self._are_stored = stored is not None
        self._by_tail: dict[str, list[tuple[Dequantized, tuple[int, int]]]] = {}
        for name, each in (stored or {}).items():
            if isinstance(each, Dequantized) and (block := float8_block(each)) is not None:
                self._by_tail.setdefault(_tail(name), []).append((each, block))

    def of(self, members: Sequence[tuple[str, nn.Linear]]) -> RowWeight | BlockWeight | None:
        """Return the weight of a product, or None where the checkpoint has that of a member otherwise."""
        parts: list[tuple[int, Tensor, Tensor]] = []
        kinds: set[bool] = set()
        for name, linear in members:
            found = self._found(f"{name}.weight", linear.weight)
            if found is None:
                return None
            begin = linear.begin if isinstance(linear, ProductPart) else 0
            parts.append((begin, *found[:2]))
            kinds.add(found[2])
        if len(kinds) > 1:
            return None
        kind = BlockWeight if kinds.pop() else RowWeight
        return kind.of(parts, parts[-1][0] + len(parts[-1][1]), members[0][1].in_features)

    def _found(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor, bool] | None:
        """Return the numbers and scales that mean exactly that weight, and whether these are of blocks.

        Whether names are the same is a guess.
        """
        if not self._are_stored:
            return (*round_rows_plainly(weight), False)
        for each, block in self._by_tail.get(_tail(name), ()):
            numbers, scale = (each.parts[part][...].to(weight.device) for part in ("numbers", "scale"))
            if numbers.shape == weight.shape:
                meant = scaled(numbers, scale, None, block).to(weight.dtype)
                if torch.equal(meant, weight):
                    return numbers, scale, block[0] == BLOCK
        return None


def rounding_on(device: torch.device) -> Rounding:
    """Return the kernels where Triton is and they run, else what torch does in several."""
    if device.type != "cuda":
        return Rounding()
    try:
        # torch for CUDA alone brings Triton along, and it takes a second to import.
        from services.engine.torch.quantized.row_kernel import round_groups, round_rows

        for kernel in (round_rows, round_groups):
            kernel(torch.ones((1, BLOCK), dtype=torch.bfloat16, device=device))
        return Rounding(round_rows, round_groups)
    except Exception as error:  # whatever Triton, a compiler or torch raises, we can do without
        log.warning("rounding_kernel_unusable error=%r", error)
        return Rounding()


def _products(model: nn.Module, kept: Collection[nn.Module]) -> list[list[tuple[str, nn.Linear]]]:
    """Return linear layers, those together that are computed by one product, each with its name.

    Layers whose weights others have, too, such as a head tied to an embedding, are left out.
    """
    owners = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    products: dict[object, list[tuple[str, nn.Linear]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module not in kept and module.in_features % STEP == 0:
            if isinstance(module, ProductPart):
                products.setdefault(module.product, []).append((name, module))
            elif type(module) is nn.Linear and owners[id(module.weight)] == 1:
                products[module] = [(name, module)]  # A subclass computes something else (Llama 4's router).
    return [sorted(members, key=_place) for members in products.values()]


def _place(member: tuple[str, nn.Linear]) -> int:
    return member[1].begin if isinstance(member[1], ProductPart) else 0


def _bias_of(whole: Product | nn.Linear, num_rows: int) -> Tensor | None:
    bias = whole.whole_bias if isinstance(whole, Product) else whole.bias
    return None if bias is None else bias.detach()[:num_rows]


def _replace(linear: nn.Linear, product: Float8Product) -> None:
    """Let the same module be of another class: others know it, and have it in their tables."""
    del linear.weight, linear.bias
    linear.__class__ = Float8Linear
    linear.product = product


def _tail(name: str) -> str:
    """Return a name from its first number on: definitions and files differ in what stands before."""
    found = re.search(r"\.\d+\..*", name)
    return found[0] if found else name


def _error(
    product: Float8Product, whole: Callable[[Tensor], Tensor], dtype: torch.dtype, num_rows: int
) -> float:
    weight = product.weight
    device = weight.numbers.device
    generator = torch.Generator(device).manual_seed(num_rows)
    rows = torch.randn((num_rows, weight.numbers.shape[1]), generator=generator, device=device)
    rows = rows.to(dtype)
    got, expected = product(rows).float(), whole(rows).float()[:, : weight.num_rows]
    error: float = ((got - expected).square().mean() / expected.square().mean()).sqrt().item()
    return error
