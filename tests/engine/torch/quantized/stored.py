"""Quantized tensors made of random numbers, each with what it means, reckoned number by number."""

import json
import random
import shutil

import torch
from safetensors.torch import load_file, save_file

from exactness.checkpoints import tiny_checkpoint

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def e4m3(byte):
    sign, exponent, fraction = byte >> 7, byte >> 3 & 15, byte & 7
    value = fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def e2m1(half):
    return -E2M1[half - 8] if half > 7 else E2M1[half]


def scales(chance, rows, columns, dtype=torch.float32):
    numbers = [[2.0 ** chance.uniform(-9, -5) for _ in range(columns)] for _ in range(rows)]
    return torch.tensor(numbers, dtype=dtype)


def words_of(numbers, bits):
    """int32 along the last dimension, the first number in the lowest bits."""
    per_word = 32 // bits
    rows = []
    for row in numbers:
        padded = row + [0] * (-len(row) % per_word)
        packed = [
            sum(value << bits * i for i, value in enumerate(padded[at : at + per_word]))
            for at in range(0, len(padded), per_word)
        ]
        rows.append([word - (1 << 32) if word >> 31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32)


def integers(chance, rows, columns, bits):
    return [[chance.randrange(1 << bits) for _ in range(columns)] for _ in range(rows)]


def product(rows, columns, value):
    """What float32 makes of two factors, each a float32 itself."""
    factors = torch.tensor([[value(i, k) for k in range(columns)] for i in range(rows)], dtype=torch.float64)
    return (factors[..., 0] * factors[..., 1]).to(torch.float32)


def fp8(chance, rows, columns, block):
    height, width = block
    bits = [[chance.choice([*range(0x7F), *range(0x80, 0xFF)]) for _ in range(columns)] for _ in range(rows)]
    scale = scales(chance, -(-rows // height), -(-columns // width))
    meant = product(rows, columns, lambda i, k: (e4m3(bits[i][k]), scale[i // height][k // width].item()))
    return torch.tensor(bits, dtype=torch.uint8).view(torch.float8_e4m3fn), scale, meant


def fp8_block(chance, name, rows, columns):
    numbers, scale, meant = fp8(chance, rows, columns, (48, 40))
    return {f"{name}.weight": numbers, f"{name}.weight_scale_inv": scale}, meant


def fp8_rows(chance, name, rows, columns):
    numbers, scale, meant = fp8(chance, rows, columns, (1, columns))
    scale = scale.to(torch.float32) if chance.random() < 0.5 else scale.reshape(-1)
    unused = {f"{name}.input_scale": torch.ones(1)}
    return {f"{name}.weight": numbers, f"{name}.weight_scale": scale, **unused}, meant


def fp8_tensor(chance, name, rows, columns):
    numbers, scale, meant = fp8(chance, rows, columns, (rows, columns))
    return {f"{name}.weight": numbers, f"{name}.weight_scale": scale.reshape(())}, meant


def int8(chance, name, rows, columns):
    numbers, scale = integers(chance, rows, columns, 8), scales(chance, rows, 1, torch.bfloat16)
    zero = [chance.randrange(-9, 9) for _ in range(rows)]
    meant = product(rows, columns, lambda i, k: (numbers[i][k] - 128 - zero[i], scale[i][0].item()))
    stored = torch.tensor([[value - 128 for value in row] for row in numbers], dtype=torch.int8)
    parts = {"weight": stored, "weight_scale": scale}
    parts["weight_zero_point"] = torch.tensor(zero, dtype=torch.int8)[:, None]
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, meant


def compressed(chance, name, rows, columns, bits=4, group=16, asymmetric=False, shuffled=False):
    numbers, scale = (
        integers(chance, rows, columns, bits),
        scales(chance, rows, columns // group, torch.bfloat16),
    )
    zeros = integers(chance, columns // group, rows, bits)
    groups = [k // group for k in range(columns)]
    if shuffled:
        chance.shuffle(groups)

    def factors(i, k):
        zero = zeros[groups[k]][i] if asymmetric else 1 << (bits - 1)
        return numbers[i][k] - zero, scale[i][groups[k]].item()

    parts = {"weight_packed": words_of(numbers, bits), "weight_scale": scale}
    parts["weight_shape"] = torch.tensor([rows, columns])
    if asymmetric:
        parts["weight_zero_point"] = words_of(zeros, bits).T.contiguous()
    if shuffled:
        parts["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
    meant = product(rows, columns, factors)
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, meant


def compressed_int4(chance, name, rows, columns):
    return compressed(chance, name, rows, columns)


def compressed_int8_asymmetric(chance, name, rows, columns):
    return compressed(chance, name, rows, columns, bits=8, group=32, asymmetric=True)


def compressed_int4_by_order(chance, name, rows, columns):
    return compressed(chance, name, rows, columns, asymmetric=True, shuffled=True)


def gptq(chance, name, rows, columns, bits=4, group=16, less_one=True):
    numbers, scale = integers(chance, rows, columns, bits), scales(chance, columns // group, rows, torch.half)
    zeros = integers(chance, columns // group, rows, bits)
    groups = [k // group for k in range(columns)]
    chance.shuffle(groups)
    meant = product(
        rows, columns, lambda i, k: (numbers[i][k] - zeros[groups[k]][i], scale[groups[k]][i].item())
    )
    top = (1 << bits) - 1
    stored = [[value - 1 & top for value in row] for row in zeros] if less_one else zeros
    parts = {"qweight": words_of(numbers, bits).T.contiguous(), "qzeros": words_of(stored, bits)}
    parts |= {"scales": scale, "g_idx": torch.tensor(groups, dtype=torch.int32)}
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, meant


def gptq_v2_int8(chance, name, rows, columns):
    return gptq(chance, name, rows, columns, bits=8, group=32, less_one=False)


def awq(chance, name, rows, columns, group=32):
    numbers, scale = integers(chance, rows, columns, 4), scales(chance, columns // group, rows, torch.half)
    zeros = integers(chance, columns // group, rows, 4)
    meant = product(
        rows, columns, lambda i, k: (numbers[i][k] - zeros[k // group][i], scale[k // group][i].item())
    )

    def shuffled(row):
        return [row[at + place] for at in range(0, len(row), 8) for place in AWQ_ORDER]

    columns_first = [[row[k] for row in numbers] for k in range(columns)]
    parts = {
        "qweight": words_of([shuffled(row) for row in columns_first], 4),
        "qzeros": words_of([shuffled(row) for row in zeros], 4),
        "scales": scale,
    }
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, meant


def pairs_of(halves):
    return torch.tensor(
        [[low | high << 4 for low, high in zip(row[::2], row[1::2], strict=True)] for row in halves],
        dtype=torch.uint8,
    )


def mxfp4(chance, rows, columns):
    """Of one expert: blocks, scales and what they mean, transposed."""
    halves = integers(chance, rows, columns, 4)
    exponents = [[chance.randrange(118, 124) for _ in range(columns // 32)] for _ in range(rows)]
    meant = product(rows, columns, lambda i, k: (e2m1(halves[i][k]), 2.0 ** (exponents[i][k // 32] - 127)))
    blocks = pairs_of(halves).view(rows, columns // 32, 16)
    return blocks, torch.tensor(exponents, dtype=torch.uint8), meant.T.contiguous()


def nvfp4(chance, rows, columns):
    halves = integers(chance, rows, columns, 4)
    bits = integers(chance, rows, columns // 16, 6)
    return halves, bits, pairs_of(halves), torch.tensor(bits, dtype=torch.uint8).view(torch.float8_e4m3fn)


def nvfp4_compressed(chance, name, rows, columns):
    halves, _, pairs, scale = nvfp4(chance, rows, columns)
    own = (scale.float() / 64).tolist()
    meant = product(rows, columns, lambda i, k: (e2m1(halves[i][k]), own[i][k // 16]))
    parts = {"weight_packed": pairs, "weight_scale": scale, "weight_global_scale": torch.tensor([64.0])}
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, meant


def nvfp4_modelopt(chance, name, rows, columns):
    halves, bits, pairs, scale = nvfp4(chance, rows, columns)
    meant = product(rows, columns, lambda i, k: (e2m1(halves[i][k]), e4m3(bits[i][k // 16]) * 0.015625))
    parts = {"weight": pairs, "weight_scale": scale, "weight_scale_2": torch.tensor(0.015625)}
    return {f"{name}.{part}": tensor for part, tensor in parts.items()}, meant


def quantized_checkpoints(folder, source, config, replace):
    """Two copies of `source`, a family or a directory.

    In one `replace` has replaced tensors, in the other is what they mean, in the same dtype. `replace(name,
    tensor)` gives the parts and what they mean, or None for what stays.
    """
    directories = []
    source = tiny_checkpoint(source) if isinstance(source, str) else source
    tensors = load_file(source / "model.safetensors")
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        found = replace(name, tensor)
        parts, whole = ({name: tensor}, tensor) if found is None else found
        stored |= parts
        meant[name] = whole
    for what, content in (("stored", stored), ("meant", meant)):
        directory = shutil.copytree(source, folder / f"{source.name}-{what}")
        save_file(
            {name: tensor.contiguous() for name, tensor in content.items()},
            directory / "model.safetensors",
            metadata={"format": "pt"},
        )
        directories.append(directory)
    path = directories[0] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return directories


def linears_by(make, seed=0):
    chance = random.Random(seed)

    def replace(name, tensor):
        if "proj" not in name or tensor.dim() != 2:
            return None
        return make(chance, name.removesuffix(".weight"), *tensor.shape)

    return replace
