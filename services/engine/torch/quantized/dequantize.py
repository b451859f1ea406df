"""These functions multiply stored numbers by their scales in float32, one function for each format.

- `scaled`: numbers of 8 bits with a scale for a row, a block, or all of them (FP8, INT8, MXFP8).
- `packed`: integers packed along a row into int32 (compressed-tensors).
- `packed_columns`: the same along columns, of a transposed matrix (GPTQ, AWQ).
- `four_bits`: floats of 4 bits, two in a byte, with a scale for 16 or 32 of a row (MXFP4, NVFP4).

Each value is rounded once more when it becomes a parameter in the served dtype.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from services.values.errors import ConfigError

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# AWQ packs eight columns in this order.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_EXPONENT_BIAS = 127


def scaled(
    numbers: Tensor, scale: Tensor, zero: Tensor | None = None, block: tuple[int, int] | None = None
) -> Tensor:
    """Return `numbers` [.., rows, columns] less `zero`, times `scale`, both broadcast over them."""
    values = numbers.float()
    if zero is not None:
        values -= _spread(zero.float(), values.shape, block)
    values *= _spread(scale_values(scale), values.shape, block)
    return values


class Grouped(NamedTuple):
    """These are integers [rows, columns], with a zero point and a scale for each group along a row."""

    values: Tensor
    points: Tensor  # The shape is [rows, groups].
    scale: Tensor  # The shape is [rows, groups].
    bits: int
    groups: Tensor | None  # This is the group of each column, where groups are not contiguous and in order.

    def floats(self) -> Tensor:
        values = self.values.float()
        values -= self._of_columns(self.points.float())
        values *= self._of_columns(self.scale.float())
        return values

    def checked(self) -> "Grouped":
        """Return itself.

        Raises ConfigError where `groups` does not fit the columns or names a missing group.
        """
        if self.groups is None:
            return self
        num_columns, num_groups = self.values.shape[-1], self.scale.shape[-1]
        if tuple(self.groups.shape) != (num_columns,):
            raise ConfigError(f"{tuple(self.groups.shape)} groups do not fit {num_columns} columns")
        if bool((self.groups < 0).any()) or bool((self.groups >= num_groups).any()):
            raise ConfigError(f"a column is of a group that is none of {num_groups}")
        return self

    def _of_columns(self, each: Tensor) -> Tensor:
        if self.groups is None:
            return _spread(each, self.values.shape, None)
        return each[..., self.groups.long()]


def packed(
    words: Tensor,
    scale: Tensor,
    num_columns: int,
    zero: Tensor | None = None,
    groups: Tensor | None = None,
) -> Grouped:
    """Unpack `words` int32 [rows, words of a row]; `zero` is packed along the rows.

    `zero` is None where numbers are symmetric.
    """
    bits = next((bits for bits in (2, 4, 8) if -(-num_columns * bits // 32) == words.shape[-1]), 0)
    if not bits:
        raise ConfigError(f"{words.shape[-1]} words of a row are no {num_columns} numbers of 2, 4 or 8 bits")
    values, num_rows = unpacked(words, bits)[..., :num_columns], words.shape[-2]
    if (groups is not None or zero is not None) and (scale.dim() != 2 or len(scale) != num_rows):
        raise ConfigError(f"scales {tuple(scale.shape)} do not fit {num_rows} rows")
    if zero is None:
        points = torch.full_like(scale, 1 << (bits - 1))
    elif tuple(zero.shape) != (-(-num_rows * bits // 32), scale.shape[-1]):
        raise ConfigError(f"zero points {tuple(zero.shape)} do not fit scales {tuple(scale.shape)}")
    else:
        points = unpacked(zero.transpose(-1, -2), bits)[..., :num_rows].transpose(-1, -2)
    return Grouped(values, points, scale, bits, groups).checked()


def packed_columns(
    words: Tensor, zeros: Tensor, scale: Tensor, groups: Tensor | None, zeros_less_one: bool
) -> Grouped:
    """Unpack a transposed matrix, [columns, rows].

    `scale` is [groups, rows] and `zeros` is packed as [groups, words of the rows]. `words` are packed like
    the zeros, which is AWQ's way, or along the columns, which is GPTQ's.
    """
    has_groups = scale.dim() == zeros.dim() == 2 and scale.numel() and len(zeros) == len(scale)
    bits = 32 * zeros.shape[-1] // scale.shape[-1] if has_groups else 0
    if bits not in (2, 4, 8) or bits * scale.shape[-1] != 32 * zeros.shape[-1]:
        raise ConfigError(f"zero points {tuple(zeros.shape)} do not fit scales {tuple(scale.shape)}")
    if words.dim() != 2 or words.shape[-1] not in (zeros.shape[-1], scale.shape[-1]):
        raise ConfigError(f"numbers {tuple(words.shape)} do not fit scales {tuple(scale.shape)}")
    if words.shape[-1] == zeros.shape[-1]:
        values, points = (_in_order(unpacked(each, bits), bits) for each in (words, zeros))
        values = values.transpose(-1, -2)
    else:
        values = unpacked(words.transpose(-1, -2), bits)
        points = unpacked(zeros, bits)
        if zeros_less_one:
            points = points + 1 & (1 << bits) - 1
    num_columns, num_groups = values.shape[-1], scale.shape[-2]
    in_order = torch.arange(num_columns, device=scale.device) // -(-num_columns // num_groups)
    if groups is None or torch.equal(groups.long(), in_order):
        groups = None if num_columns % num_groups == 0 else in_order
    return Grouped(values, points.transpose(-1, -2), scale.transpose(-1, -2), bits, groups).checked()


def four_bits(pairs: Tensor, scale: Tensor) -> Tensor:
    """Return `pairs` uint8 [.., rows, columns / 2], whose low half is the first number, times `scale`.

    `scale` is [.., rows, columns / 16 or 32].
    """
    table = torch.tensor(_E2M1 + tuple(-value for value in _E2M1))
    values = torch.stack((table[(pairs & 15).int()], table[(pairs >> 4).int()]), -1).flatten(-2)
    values *= _spread(scale_values(scale), values.shape, None)
    return values


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return int32 [.., words] as their numbers [.., words * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def scale_values(scale: Tensor) -> Tensor:
    """Return scales as float32; bytes are exponents of 2."""
    if scale.dtype is torch.uint8:
        return torch.ldexp(torch.ones(scale.shape), scale.int() - _EXPONENT_BIAS)
    return scale.float()


def _in_order(numbers: Tensor, bits: int) -> Tensor:
    if bits != 4:
        raise ConfigError(f"AWQ weights of {bits} bits are not served")
    return numbers.unflatten(-1, (-1, len(_AWQ_ORDER)))[
        ..., torch.tensor(_AWQ_ORDER, device=numbers.device).argsort()
    ].flatten(-2)


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """Return a tensor that broadcasts over `shape`, from one scale for all, for each row, or for each block.

    Blocks without a stated size fit evenly; blocks of a stated size may be cut at the end. Scales without a
    dimension for columns are per row: with fewer, the sizes of their parts would be unknown.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == len(shape) - 1:
        if scale.shape[-1] not in (1, shape[-2]):
            raise ConfigError(f"{scale.shape[-1]} scales do not fit {shape[-2]} rows")
        scale = scale[..., None]
    if scale.dim() != len(shape) or scale.shape[:-2] != shape[:-2]:
        raise ConfigError(f"scales {tuple(scale.shape)} do not fit numbers {tuple(shape)}")
    for dim, stated in ((-2, block and block[0]), (-1, block and block[1])):
        size, count = shape[dim], scale.shape[dim]
        if count in (1, size):
            continue
        length = stated if stated and -(-size // stated) == count else size // count
        if -(-size // length) != count or (length != stated and size % count):
            raise ConfigError(f"scales {tuple(scale.shape)} do not fit numbers {tuple(shape)}")
        scale = scale.repeat_interleave(length, dim).narrow(dim, 0, size)
    return scale
