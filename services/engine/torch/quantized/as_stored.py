"""Linear layers multiply weights as a checkpoint stores them on a GPU, to read and hold fewer bytes.

With floats of 8 bits, activations are rounded to 8 bits, too, with a scale per row; any checkpoint's weights
may be rounded so when the runner starts. With numbers of 4 bits, activations keep their type.

A row's product does not depend on the other rows of the step. Rounding activations changes a layer's output
by some 2.6 % (with three bits of mantissa), and rounding a weight does as much. Each layer is tried beside
the one that it replaces, and left out where it cannot compute or its error is larger.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.start_fault import may_pass
from services.engine.torch.model.fused.products import Product, ProductPart
from services.engine.torch.quantized.dequantize import Grouped, scaled
from services.engine.torch.quantized.stored_products import (
    BLOCK,
    PLAIN,
    STEP,
    BlockProduct,
    BlockWeight,
    Int4Kernels,
    Int4Product,
    Int4Weight,
    Round,
    RowProduct,
    RowWeight,
    round_groups_plainly,
    round_rows_plainly,
    round_to_int4,
)
from services.engine.torch.quantized.stored_tensors import Dequantized, StoredTensor, float8_block

log = logging.getLogger(__name__)

WeightsForm = Literal["dequantized", "fp8", "int4"]
RoundedTo = Literal["fp8", "int4"]
Weight = RowWeight | BlockWeight | Int4Weight
_Members = list[tuple[str, nn.Linear]]
Small = RowProduct | BlockProduct | Int4Product

# Rounding to 8 bits explains 2.6 % or 3.7 %, dequantized weights .2 %, and rounding to 4 bits 11 %. A lost
# scale, or rows in another order, change the whole result.
_TOLERANCE, _INT4_TOLERANCE, _INT4_ROUNDED_TOLERANCE = 0.08, 0.02, 0.25
_TRIED_ROWS = (1, 17, 40, 200)  # Each kernel is compiled for them.
# cuBLAS may need this many rows, or a multiple; a step that fails is not tried again.
_ROW_STEPS = (1, 4, 16)


class StoredLinear(nn.Linear):
    product: Small

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input)


@dataclass(frozen=True, slots=True)
class StoredKernels:
    round_rows: Round = round_rows_plainly
    round_groups: Round = round_groups_plainly
    int4: Int4Kernels | None = PLAIN  # With None they are not multiplied as stored.


@torch.no_grad()
def multiply_as_stored(
    model: PreTrainedModel,
    kept: Collection[nn.Module],
    weights: Mapping[str, StoredTensor | Dequantized] | RoundedTo,
    report: Callable[[str, str], None] = lambda name, kind: None,
) -> str:
    """Let linear layers multiply weights as stored, except those in `kept`, and return the counts.

    With a checkpoint's `weights` by name, these are the layers whose weights it stores quantized. Otherwise
    these are all but the head, whose weights are rounded now. A layer whose error is too large stays, and so
    do all of a kind that the device cannot compute. `report` is called with the name and the kind of each
    changed layer.
    """
    if isinstance(weights, str):
        kept = {*kept, model.get_output_embeddings()}
    numbers = _Numbers(weights)
    int4_tolerance = _INT4_ROUNDED_TOLERANCE if weights == "int4" else _INT4_TOLERANCE
    ways = _Ways(kernels_on(next(model.parameters()).device), int4_tolerance)
    counts: Counter[str] = Counter()
    stored = chain.from_iterable(_stored_alike(each, numbers) for each in _products(model, kept))
    for members, weight in stored:
        first = members[0][1]
        whole = first.product if isinstance(first, ProductPart) else first
        if (product := ways.product(weight, whole, members[0])) is None:
            continue
        if isinstance(whole, Product):
            whole.compute_by(product)
        else:
            _replace(whole, product)
        counts[_KINDS[type(weight)]] += 1
        for name, _ in members:
            report(name, _KINDS[type(weight)])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # This frees the memory of the replaced weights.
    counted = " ".join(f"{kind}={count}" for kind, count in sorted(counts.items()))
    log.info("multiplied_as_stored %s", counted or "products=0")
    return counted


def way_of(form: WeightsForm | None, kinds: Mapping[str, str]) -> str:
    """Return what identifies such a model: the form of its numbers, and how each layer is computed, or ""."""
    layers = " ".join(f"{name}={kind}" for name, kind in sorted(kinds.items()))
    return f"{form or 'stored'} {layers}" if layers else ""


_KINDS: Mapping[type, str] = {RowWeight: "float8_rows", BlockWeight: "float8_blocks", Int4Weight: "int4"}


class _Ways:
    def __init__(self, kernels: StoredKernels, int4_tolerance: float) -> None:
        self._kernels, self._int4_tolerance = kernels, int4_tolerance
        self._row_steps = {RowWeight: [*_ROW_STEPS], BlockWeight: [*_ROW_STEPS], Int4Weight: [1]}

    def product(
        self, weight: Weight, whole: Product | nn.Linear, first: tuple[str, nn.Linear]
    ) -> Small | None:
        """Return a product that computes `whole` up to rounding, or None where there is none."""
        name, dtype = first[0], first[1].weight.dtype
        for product in self._products(weight, _bias_of(whole, weight.num_rows)):
            try:
                error = max(_error(product, whole, dtype, num_rows) for num_rows in _TRIED_ROWS)
            except Exception as raised:  # torch refuses what this device, or its library, cannot compute.
                if may_pass(raised):  # A temporary fault is no reason to compute otherwise.
                    raise
                log.warning("stored_weight_unusable layer=%s error=%r", name, raised)
                self._give_up(product)
                continue
            tolerance = self._int4_tolerance if isinstance(product, Int4Product) else _TOLERANCE
            if error <= tolerance:  # This is false for NaN.
                return product
            log.warning("stored_weight_unusable layer=%s off=%.2g of=%.2g", name, error, tolerance)
        return None

    def _products(self, weight: Weight, bias: Tensor | None) -> Iterator[Small]:
        kernels = self._kernels
        for step in tuple(self._row_steps[type(weight)]):
            if isinstance(weight, BlockWeight):
                yield BlockProduct(weight, bias, kernels.round_groups, step)
            elif isinstance(weight, RowWeight):
                yield RowProduct(weight, bias, kernels.round_rows, step)
            elif kernels.int4 is not None:
                yield Int4Product(weight, bias, kernels.int4)

    def _give_up(self, product: Small) -> None:
        step = 1 if isinstance(product, Int4Product) else product.row_step
        self._row_steps[type(product.weight)].remove(step)


class _Numbers:
    def __init__(self, weights: Mapping[str, StoredTensor | Dequantized] | RoundedTo) -> None:
        self._rounded_to = weights if isinstance(weights, str) else None
        self._by_tail: dict[str, list[Dequantized]] = {}
        for name, each in weights.items() if not isinstance(weights, str) else ():
            if isinstance(each, Dequantized):
                self._by_tail.setdefault(_tail(name), []).append(each)

    def of(self, members: Sequence[tuple[str, nn.Linear]]) -> Weight | None:
        """Return the weight of these layers, or None where the checkpoint stores one of them otherwise.

        The members of a product may be all of it, or one that is to be taken out of it.
        """
        found: list[tuple[int, _Stored]] = []
        origin = _place(members[0])
        for name, linear in members:
            own = self._found(f"{name}.weight", linear.weight)
            if own is None:
                return None
            found.append((_place((name, linear)) - origin, own))
        num_rows, depth = found[-1][0] + members[-1][1].out_features, members[0][1].in_features
        grouped = [(begin, own) for begin, own in found if isinstance(own, Grouped)]
        floats = [(begin, own) for begin, own in found if not isinstance(own, Grouped)]
        if not floats:
            return Int4Weight.of(grouped, num_rows, depth)
        kinds = {of_blocks for _, (_, _, of_blocks) in floats}
        if grouped or len(kinds) > 1:
            return None
        kind = BlockWeight if kinds.pop() else RowWeight
        return kind.of([(begin, numbers, scale) for begin, (numbers, scale, _) in floats], num_rows, depth)

    def _found(self, name: str, weight: Tensor) -> "_Stored | None":
        """Return the stored numbers that equal the weight; a matching name alone may be another weight's."""
        if self._rounded_to == "int4":
            return round_to_int4(weight)
        if self._rounded_to == "fp8":
            return (*round_rows_plainly(weight), False)
        for each in self._by_tail.get(_tail(name), ()):
            if (block := float8_block(each)) is not None:
                numbers, scale = (each.parts[part][...].to(weight.device) for part in ("numbers", "scale"))
                if _is(scaled(numbers, scale, None, block), weight):
                    return numbers, scale, block[0] == BLOCK
            elif (grouped := each.grouped(weight.device)) is not None and _is(grouped.floats(), weight):
                return grouped
        return None


# This is floats of 8 bits, their scales, and whether these are of blocks; or numbers of 4 bits.
_Stored = tuple[Tensor, Tensor, bool] | Grouped


def _is(meant: Tensor, weight: Tensor) -> bool:
    return bool(meant.shape == weight.shape) and torch.equal(meant.to(weight.dtype), weight)


def kernels_on(device: torch.device) -> StoredKernels:
    """Return Triton's kernels where they run.

    Otherwise torch's operations round, with several launches, and numbers of 4 bits stay dequantized.
    """
    if device.type != "cuda":
        return StoredKernels()
    try:
        # Only torch for CUDA includes Triton, which takes a second to import.
        from services.engine.torch.quantized.stored_kernel import KERNELS, round_groups, round_rows
    except Exception as error:
        log.warning("stored_kernels_unusable error=%r", error)
        return StoredKernels(int4=None)
    try:
        for kernel in (round_rows, round_groups):
            kernel(torch.ones((1, BLOCK), dtype=torch.bfloat16, device=device))
    # Triton, a compiler or torch may raise anything: GPUs before compute capability 8.9 have no such floats.
    except Exception as error:
        log.warning("rounding_kernel_unusable error=%r", error)
        return StoredKernels(int4=KERNELS)
    return StoredKernels(round_rows, round_groups, KERNELS)


def _products(model: nn.Module, kept: Collection[nn.Module]) -> list[_Members]:
    """Return the linear layers with their names, those of one product together.

    Layers that share their weights, such as a head tied to an embedding, are left out.
    """
    owners = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    products: dict[object, _Members] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module not in kept and module.in_features % STEP == 0:
            if isinstance(module, ProductPart):
                products.setdefault(module.product, []).append((name, module))
            elif type(module) is nn.Linear and owners[id(module.weight)] == 1:
                products[module] = [(name, module)]  # A subclass computes something else (Llama 4's router).
    return [sorted(members, key=_place) for members in products.values()]


def _stored_alike(members: _Members, numbers: _Numbers) -> Iterator[tuple[_Members, Weight]]:
    """Yield a product's members with their weight, or one by one where they are stored differently.

    A product is split where any member's weight is stored quantized: a small gate that a checkpoint leaves in
    the served dtype does not keep the large weights beside it from being multiplied as stored.
    """
    if (weight := numbers.of(members)) is not None:
        yield members, weight
        return
    first = members[0][1]
    if isinstance(first, ProductPart):
        singly = [([each], weight) for each in members if (weight := numbers.of([each])) is not None]
        if singly:
            first.product.split()
        yield from singly


def _place(member: tuple[str, nn.Linear]) -> int:
    return member[1].begin if isinstance(member[1], ProductPart) else 0


def _bias_of(whole: Product | nn.Linear, num_rows: int) -> Tensor | None:
    bias = whole.whole_bias if isinstance(whole, Product) else whole.bias
    return None if bias is None else bias.detach()[:num_rows]


def _replace(linear: nn.Linear, product: Small) -> None:
    """Change the module's class in place, since others hold a reference to it."""
    del linear.weight, linear.bias
    linear.__class__ = StoredLinear
    linear.product = product


def _tail(name: str) -> str:
    """Return the name from its first number on, since definitions and files differ before it."""
    found = re.search(r"\.\d+\..*", name)
    return found[0] if found else name


def _error(product: Small, whole: Callable[[Tensor], Tensor], dtype: torch.dtype, num_rows: int) -> float:
    weight = product.weight
    device = weight.scales.device
    generator = torch.Generator(device).manual_seed(num_rows)
    rows = torch.randn((num_rows, weight.depth), generator=generator, device=device)
    rows = rows.to(dtype)
    got, expected = product(rows).float(), whole(rows).float()[:, : weight.num_rows]
    error: float = ((got - expected).square().mean() / expected.square().mean()).sqrt().item()
    return error
