"""GGUF files are read, against blocks that are taken apart value by value, or refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.gguf_files import ARRAY, BOOL, F32, TEXT, U32, gguf_bytes
from services.model.gguf import BLOCK_TYPES, floats_of, read_gguf
from services.values.errors import ConfigError

HALVES = st.floats(-60_000, 60_000, width=16)
BLOCK = 32


def half(number):
    return struct.pack("<e", number)


def as_half(number):
    return struct.unpack("<e", half(number))[0]


@st.composite
def q4_blocks(draw, has_least):
    """(bytes of a block, its 32 values)"""
    scale, least = draw(HALVES), draw(HALVES) if has_least else None
    low, high = (draw(st.lists(st.integers(0, 15), min_size=16, max_size=16)) for _ in range(2))
    packed = bytes(a | b << 4 for a, b in zip(low, high, strict=True))
    if has_least:
        return half(scale) + half(least) + packed, [as_half(scale) * q + as_half(least) for q in low + high]
    return half(scale) + packed, [as_half(scale) * (q - 8) for q in low + high]


@st.composite
def q8_blocks(draw):
    scale = draw(HALVES)
    values = draw(st.lists(st.integers(-128, 127), min_size=BLOCK, max_size=BLOCK))
    return half(scale) + struct.pack("32b", *values), [as_half(scale) * q for q in values]


def numbers(code):
    finite = st.floats(-60_000, 60_000, width={"f": 32, "e": 16}[code])
    return st.lists(finite, min_size=BLOCK, max_size=BLOCK).map(
        lambda values: (struct.pack(f"<32{code}", *values), values)
    )


def bfloats():
    """A bfloat16 is the upper half of a float32."""
    return st.lists(st.integers(0, 0x7F7F), min_size=BLOCK, max_size=BLOCK).map(
        lambda bits: (
            struct.pack("<32H", *bits),
            [struct.unpack("<f", struct.pack("<I", each << 16))[0] for each in bits],
        )
    )


TYPES = {
    0: numbers("f"),
    1: numbers("e"),
    2: q4_blocks(has_least=False),
    3: q4_blocks(has_least=True),
    8: q8_blocks(),
    30: bfloats(),
}


@given(st.data(), st.sampled_from(sorted(TYPES)), st.integers(1, 3), st.integers(1, 2))
def test_values_are_those_of_their_blocks(data, kind, rows, blocks_a_row):
    blocks = [data.draw(TYPES[kind]) for _ in range(rows * blocks_a_row)]
    shape = (rows, blocks_a_row * BLOCK)
    before = ("before", ((1, 32), 0, bytes(128)))
    tensor = ("weight", (shape, kind, b"".join(content for content, _ in blocks)))
    file = gguf_bytes([], dict([before, tensor]))
    read = read_gguf(file)
    assert [each.name for each in read.tensors] == ["before", "weight"]
    values = floats_of(file, read.tensors[1])
    expected = np.array([value for _, values in blocks for value in values], "f8").reshape(shape)
    assert values.dtype == np.float32 and values.shape == shape
    # A product and a sum in float32 round twice; the products themselves may cancel.
    largest = max(1e-30, max(abs(v) for content, vs in blocks for v in (*vs, *struct_halves(kind, content))))
    assert np.abs(values - expected).max() <= 4e-7 * 16 * largest


def struct_halves(kind, content):
    """A block's own scale and least value, whose product and sum its values are."""
    return struct.unpack_from("<2e" if kind == 3 else "<e", content) if kind in (2, 3, 8) else ()


def unpacked_block(kind, block):
    """The values of a block as ggml-quants.c takes it apart, one by one, in float32."""
    f, at = np.float32, 0

    def take(count):
        nonlocal at
        at += count
        return block[at - count : at]

    def number():
        return f(struct.unpack("<e", take(2))[0])

    values = []
    if kind in (6, 7):  # Q5_0 and Q5_1
        scale = number()
        least = number() if kind == 7 else None
        high, low = int.from_bytes(take(4), "little"), take(16)
        for i in range(32):
            q = (low[i % 16] >> 4 * (i // 16) & 15) | (high >> i & 1) << 4
            values.append(f(q) * scale + least if kind == 7 else f(q - 16) * scale)
    if kind == 10:  # Q2_K
        scales, low, scale, least = take(16), take(64), number(), number()
        for i in range(256):
            half, part, k = i // 128, i % 128 // 32, i % 32
            q, own = low[32 * half + k] >> 2 * part & 3, scales[i // 16]
            values.append(f(q) * (scale * f(own & 15)) - least * f(own >> 4))
    if kind == 11:  # Q3_K
        high, low, packed, scale = take(32), take(64), take(12), number()
        for i in range(256):
            half, part, k, j = i // 128, i % 128 // 32, i % 32, i // 16
            q = (low[32 * half + k] >> 2 * part & 3) - (0 if high[k] >> (i // 32) & 1 else 4)
            four = packed[j % 8] >> 4 * (j // 8) & 15
            own = (four | (packed[8 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32
            values.append(f(q) * (scale * f(own)))
    if kind in (12, 13):  # Q4_K and Q5_K
        scale, least, packed = number(), number(), take(12)
        high, low = take(32) if kind == 13 else bytes(32), take(128)
        for i in range(256):
            j, k = i // 32, i % 32
            if j < 4:
                own, own_least = packed[j] & 63, packed[j + 4] & 63
            else:
                own = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
                own_least = packed[j + 4] >> 4 | packed[j] >> 6 << 4
            q = (low[32 * (j // 2) + k] >> 4 * (j % 2) & 15) + 16 * (high[k] >> j & 1)
            values.append(f(q) * (scale * f(own)) - least * f(own_least))
    if kind == 14:  # Q6_K
        low, high, scales, scale = take(128), take(64), struct.unpack("16b", take(16)), number()
        for i in range(256):
            half, part, k = i // 128, i % 128 // 32, i % 32
            four = low[64 * half + 32 * (part % 2) + k] >> 4 * (part // 2) & 15
            q = (four | (high[32 * half + k] >> 2 * part & 3) << 4) - 32
            values.append(f(q) * (scale * f(scales[i // 16])))
    assert at == len(block)
    return values


def test_values_of_packed_blocks_are_theirs_to_the_bit(subtests):
    for kind in (6, 7, 10, 11, 12, 13, 14):
        with subtests.test(kind=kind):
            check_packed_blocks(kind)


def check_packed_blocks(kind):
    of_type = BLOCK_TYPES[kind]
    items = np.frombuffer(np.random.default_rng(kind).bytes(6 * of_type.dtype.itemsize), of_type.dtype).copy()
    for name in {"scale", "least"} & {*of_type.dtype.names}:
        items[name] = np.random.default_rng(1).normal(size=6)
    file = gguf_bytes([], {"weight": ((3, 2 * of_type.values), kind, items.tobytes())})
    values = floats_of(file, read_gguf(file).tensors[0])
    expected = [value for item in items for value in unpacked_block(kind, item.tobytes())]
    assert values.shape == (3, 2 * of_type.values)
    assert values.reshape(-1).tobytes() == np.array(expected, np.float32).tobytes()


METADATA = [
    ("a.number", U32, 7),
    ("a.float", F32, 0.5),
    ("a.bool", BOOL, True),
    ("a.text", TEXT, "Grüße"),
    ("texts", ARRAY, ["a", "", "ß"], TEXT),
    ("numbers", ARRAY, [1, 2, 3], U32),
    ("general.alignment", U32, 64),
]


def test_metadata_is_read_and_a_file_that_is_cut_anywhere_is_refused():
    file = gguf_bytes(METADATA, {"w": ((2, 3), 0, struct.pack("<6f", *range(6)))}, alignment=64)
    read = read_gguf(file)
    assert read.metadata == {
        "a.number": 7,
        "a.float": 0.5,
        "a.bool": True,
        "a.text": "Grüße",
        "texts": ["a", "", "ß"],
        "numbers": [1, 2, 3],
        "general.alignment": 64,
    }
    assert floats_of(file, read.tensors[0]).tolist() == [[0, 1, 2], [3, 4, 5]]
    end = read.tensors[0].start + 24
    for length in range(end):
        with pytest.raises(ConfigError, match=r"cut short|not a GGUF"):
            read_gguf(file[:length])


def test_what_is_not_read_is_named(subtests):
    for file, why in [
        (b"PK\3\4" + bytes(60), "not a GGUF file"),
        (gguf_bytes([], {}, version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (gguf_bytes([("split.count", U32, 3)], {}), "one part of several"),
        (gguf_bytes([("general.alignment", U32, 0)], {}), "general.alignment is 0"),
        (
            gguf_bytes([], {"w": ((1, 256), 23, bytes(144))}),
            "w of the GGUF file is of type IQ4_XS; read are F32,",
        ),
        (gguf_bytes([], {"w": ((1, 32), 99, bytes(144))}), "type number 99"),
        (gguf_bytes([], {"w": ((1, 33), 8, bytes(68))}), "no whole blocks"),
    ]:
        with subtests.test(why=why), pytest.raises(ConfigError, match=why):
            read_gguf(file)
