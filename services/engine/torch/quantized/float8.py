"""Linear layers multiply floats of 8 bits on a GPU: half the bytes of a weight are read, at twice the rate.

    a weight    a scale for each of its rows: as a checkpoint has them, or rounded so when the runner starts
    a step      each row of activations has a scale, too: its largest number / 448

So a row's product does not depend on what else is in the step. The product is torch's. Rounding activations
changes what a layer gives by some 2.6 % (3 bits behind the point), and rounding its weights by as much. Each
layer is tried beside the one that it replaces, and left out where it cannot compute or is off by more.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.engine.torch.model.fused.products import Product, ProductPart
from services.engine.torch.quantized.dequantize import scaled
from services.engine.torch.quantized.parts import Dequantized, Stored, is_of_rows

log = logging.getLogger(__name__)

WeightsForm = Literal["dequantized", "fp8"]
RoundRows = Callable[[Tensor], tuple[Tensor, Tensor]]

_LARGEST, _SMALLEST = 448.0, 1e-12
_STEP = 16  # Widths are multiples of that.
# Rounding explains 2.6 % or 3.7 %; a lost scale, or rows of another order, change all of it.
_TOLERANCE = 0.08
_TRIED_ROWS = (1, 17, 200)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    numbers: Tensor  # [num_rows filled up, depth]
    scales: Tensor  # float32 [1, num_rows filled up]
    num_rows: int

    @classmethod
    def of(cls, parts: Sequence[tuple[int, Tensor, Tensor]], num_rows: int, depth: int) -> "Float8Weight":
        """Make it of parts, each from a row on: numbers [rows, depth], and a scale for each or for all."""
        filled_up = -(-num_rows // _STEP) * _STEP
        device = parts[0][1].device
        numbers = torch.zeros((filled_up, depth), dtype=torch.uint8, device=device)
        scales = torch.ones((1, filled_up), dtype=torch.float32, device=device)
        for begin, part, scale in parts:
            numbers[begin : begin + len(part)] = part.view(torch.uint8)
            scales[0, begin : begin + len(part)] = scale.float().reshape(-1)
        return cls(numbers.view(torch.float8_e4m3fn), scales, num_rows)


@dataclass(frozen=True, slots=True)
class Float8Product:
    weight: Float8Weight
    bias: Tensor | None
    round_rows: RoundRows

    def __call__(self, rows: Tensor) -> Tensor:
        weight = self.weight
        numbers, scales = self.round_rows(rows.reshape(-1, rows.shape[-1]).contiguous())
        product = torch._scaled_mm(
            numbers,
            weight.numbers.t(),
            scale_a=scales,
            scale_b=weight.scales,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        product = product[:, : weight.num_rows].view(*rows.shape[:-1], weight.num_rows).to(rows.dtype)
        return product if self.bias is None else product + self.bias.to(rows.dtype)


class Float8Linear(nn.Linear):
    """This layer keeps no weight in the served dtype."""

    product: Float8Product

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input)


def round_rows_plainly(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` as floats of 8 bits, and their scales [n, 1]."""
    numbers = rows.float()
    largest = numbers.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST)
    rounded = (numbers * (_LARGEST / largest)).clamp(-_LARGEST, _LARGEST)
    return rounded.to(torch.float8_e4m3fn), largest / _LARGEST


def choose_round_rows(device: torch.device) -> RoundRows:
    """Return the kernel where Triton is and it runs, else what torch does in several."""
    if device.type != "cuda":
        return round_rows_plainly
    try:
        # torch for CUDA alone brings Triton along, and it takes a second to import.
        from services.engine.torch.quantized.row_kernel import round_rows

        round_rows(torch.ones((1, _STEP), dtype=torch.bfloat16, device=device))
        return round_rows
    except Exception as error:  # whatever Triton, a compiler or torch raises, we can do without
        log.warning("rounding_kernel_unusable error=%r", error)
        return round_rows_plainly


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
    numbers = _Numbers(stored)
    round_rows = choose_round_rows(next(model.parameters()).device)
    count = 0
    for members in _products(model, kept):
        first = members[0][1]
        weight = numbers.of(members)
        if weight is None:
            continue
        whole = first.product if isinstance(first, ProductPart) else first
        product = Float8Product(
            weight, whole.whole_bias if isinstance(whole, Product) else whole.bias, round_rows
        )
        try:
            error = max(_error(product, whole, first, num_rows) for num_rows in _TRIED_ROWS)
        except Exception as raised:  # torch refuses what this device, or its library, cannot compute
            log.warning("float8_unusable layer=%s error=%r", members[0][0], raised)
            break
        if not error <= _TOLERANCE:  # NaN fails, too
            log.warning("float8_unusable layer=%s off=%.2g of=%.2g", members[0][0], error, _TOLERANCE)
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


class _Numbers:
    """The numbers of weights are those of a checkpoint, or rounded now."""

    def __init__(self, stored: Mapping[str, Stored | Dequantized] | None) -> None:
        self._are_stored = stored is not None
        self._by_tail: dict[str, list[Dequantized]] = {}
        for name, each in (stored or {}).items():
            if is_of_rows(each):
                self._by_tail.setdefault(_tail(name), []).append(each)

    def of(self, members: Sequence[tuple[str, nn.Linear]]) -> Float8Weight | None:
        """Return the weight of a product, or None where the checkpoint has that of a member otherwise."""
        parts: list[tuple[int, Tensor, Tensor]] = []
        end = 0
        for name, linear in members:
            begin = linear.begin if isinstance(linear, ProductPart) else 0
            found = self._found(f"{name}.weight", linear.weight)
            if found is None:
                return None
            parts.append((begin, *found))
            end = begin + linear.out_features
        return Float8Weight.of(parts, end, members[0][1].in_features)

    def _found(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the numbers that mean exactly that weight: whether names are the same is a guess."""
        if not self._are_stored:
            return round_rows_plainly(weight)
        for each in self._by_tail.get(_tail(name), ()):
            numbers, scale = (each.parts[part][...].to(weight.device) for part in ("numbers", "scale"))
            if numbers.shape == weight.shape and torch.equal(scaled(numbers, scale).to(weight.dtype), weight):
                return numbers, scale
        return None


def _products(model: nn.Module, kept: Collection[nn.Module]) -> list[list[tuple[str, nn.Linear]]]:
    """Return linear layers, those together that are computed by one product, each with its name.

    Layers whose weights others have, too, such as a head tied to an embedding, are left out.
    """
    owners = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    products: dict[object, list[tuple[str, nn.Linear]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module not in kept and module.in_features % _STEP == 0:
            if isinstance(module, ProductPart):
                products.setdefault(module.product, []).append((name, module))
            elif type(module) is nn.Linear and owners[id(module.weight)] == 1:
                products[module] = [(name, module)]  # A subclass computes something else (Llama 4's router).
    return [sorted(members, key=_place) for members in products.values()]


def _place(member: tuple[str, nn.Linear]) -> int:
    return member[1].begin if isinstance(member[1], ProductPart) else 0


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
    product: Float8Product, whole: Callable[[Tensor], Tensor], first: nn.Linear, num_rows: int
) -> float:
    weight = first.weight
    generator = torch.Generator(weight.device).manual_seed(num_rows)
    rows = torch.randn((num_rows, first.in_features), generator=generator, device=weight.device)
    rows = rows.to(weight.dtype)
    got, expected = product(rows).float(), whole(rows).float()
    error: float = (
        ((got - expected[:, : got.shape[1]]).square().mean() / expected.square().mean()).sqrt().item()
    )
    return error
