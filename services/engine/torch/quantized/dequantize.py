"""Stored numbers times their scales are weights again, in float32: one function for each way of storing them.

    scaled         numbers of 8 bits, and a scale for a row, a block, or all of them (FP8, INT8, MXFP8)
    packed         whole numbers packed along a row into int32 (compressed-tensors)
    packed_columns the same along columns, of a matrix that lies transposed (GPTQ, AWQ)
    four_bits      floats of 4 bits, two in a byte, and a scale for 16 or 32 of a row (MXFP4, NVFP4)

Each value is rounded once more when it becomes a parameter in the dtype that is served.
"""

import torch
from torch import Tensor

from services.values.errors import ConfigError

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# AWQ packs the columns of eight in this order.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_EXPONENT_BIAS = 127


def scaled(
    numbers: Tensor, scale: Tensor, zero: Tensor | None = None, block: tuple[int, int] | None = None
) -> Tensor:
    """Return `numbers` [.., rows, columns], less `zero`, times `scale`, both spread over them."""
    values = numbers.float()
    if zero is not None:
        values -= _spread(zero.float(), values.shape, block)
    values *= _spread(scale_values(scale), values.shape, block)
    return values


def packed(
    words: Tensor,
    scale: Tensor,
    num_columns: int,
    zero: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """Return `words` int32 [rows, words of a row] as [rows, num_columns].

    `scale` is [rows, groups], `groups` the group of each column where they are not one after another; `zero`
    is packed along the rows, where numbers are not symmetric.
    """
    bits = next((bits for bits in (2, 4, 8) if -(-num_columns * bits // 32) == words.shape[-1]), 0)
    if not bits:
        raise ConfigError(f"{words.shape[-1]} words of a row are no {num_columns} numbers of 2, 4 or 8 bits")
    values = unpacked(words, bits)[..., :num_columns].float()
    if zero is None:
        values -= 1 << (bits - 1)
    else:
        zeros = zero.transpose(-1, -2)
        rows = unpacked(zeros, bits)[..., : words.shape[-2]].transpose(-1, -2).float()
        values -= _of_groups(rows, values.shape, groups)
    values *= _of_groups(scale.float(), values.shape, groups)
    return values


def packed_columns(
    words: Tensor, zeros: Tensor, scale: Tensor, groups: Tensor | None, zeros_less_one: bool
) -> Tensor:
    """Return [columns, rows] of a matrix [rows, columns].

    `scale` is [groups, columns] and `zeros` packed as [groups, words of the columns]. Either `words` are
    packed as the zeros, which is AWQ's way, or along the rows, which is GPTQ's.
    """
    bits = 32 * zeros.shape[-1] // scale.shape[-1]
    if bits not in (2, 4, 8) or bits * scale.shape[-1] != 32 * zeros.shape[-1]:
        raise ConfigError(f"zero points {tuple(zeros.shape)} do not fit scales {tuple(scale.shape)}")
    if words.shape[-1] == zeros.shape[-1]:
        values, points = (_in_order(unpacked(each, bits), bits) for each in (words, zeros))
    else:
        values = unpacked(words.transpose(-1, -2), bits).transpose(-1, -2)
        points = unpacked(zeros, bits)
        if zeros_less_one:
            points = points + 1 & (1 << bits) - 1
    rows = values.shape[-2]
    if groups is None:
        groups = torch.arange(rows) // -(-rows // scale.shape[-2])
    return ((values.float() - points.float()[groups]) * scale.float()[groups]).transpose(-1, -2).contiguous()


def four_bits(pairs: Tensor, scale: Tensor) -> Tensor:
    """Return `pairs` uint8 [.., rows, columns / 2], of which the low half is the first, times `scale`.

    That is [.., rows, columns / 16 or 32].
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
    return numbers.unflatten(-1, (-1, len(_AWQ_ORDER)))[..., torch.tensor(_AWQ_ORDER).argsort()].flatten(-2)


def _of_groups(scale: Tensor, shape: torch.Size, groups: Tensor | None) -> Tensor:
    return _spread(scale, shape, None) if groups is None else scale[..., groups.long()]


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """Return a tensor that broadcasts over `shape`, of one scale for all, for each row, or for each block.

    Blocks of a size that is not stated fit evenly; those of a stated size may be cut at the end.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == len(shape) - 1:
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
