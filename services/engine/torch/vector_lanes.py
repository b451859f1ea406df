"""Code that numba compiles uses these vectors of float32: one instruction computes all lanes in a register.

LLVM alone vectorizes only the innermost loop, and stores its sums in every iteration. A product of small
matrices should keep its sums in registers through its inner loop, and these functions do so.

`zero = zeros(16)` has 16 lanes and is the type of all vectors made like it. `load(numbers, index, zero)`
reads numbers[index : index + 16]; `store(numbers, index, exp(subtract(x, y)))` writes them. `multiply_rows(8,
...)` is a product of matrices, eight rows at once. `multiply_tile(8, ...)` is the same, two vectors wide, for
matrices in another order.

Arrays are one-dimensional, contiguous and float32. A matrix may be uint16, which means bfloat16; int16, which
means float16 (where HAS_FLOAT16); or uint8, which means float8_e4m3fn, whose NaN is read as 480. Indices are
not checked, and negative ones do not count from the end.
"""

import platform
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

# Elsewhere LLVM would call a function for each number, from a library that is not linked.
HAS_FLOAT16: bool = platform.machine() == "aarch64" or bool(get_host_cpu_features().get("f16c"))

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)

# The formula is that of Cephes' expf: 2**n * e**r, where r is at most half of log 2, and log 2 is subtracted
# in two parts.
_LOWEST = -87.0  # e to that power is the smallest normal number.
_LOG2_E, _LOG_2_HIGH, _LOG_2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
_EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_ROUNDING = 12582912.0  # This is 1.5 * 2**23: a sum with it has no bits left for a fraction.
_MANTISSA_BITS, _ONE_AS_BITS = 23, 0x3F800000
_TANH_IS_ONE = 20.0


class Lanes(types.Type):
    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(name=f"Lanes({width})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, _vector(lanes.width))


def _vector(width: int, of: ir.Type = _FLOAT) -> ir.VectorType:
    return ir.VectorType(of, width)


def _all(width: int, value: float) -> ir.Constant:
    (single,) = struct.unpack("f", struct.pack("f", value))
    return ir.Constant(_vector(width), [single] * width)


def _all_int(width: int, value: int) -> ir.Constant:
    return ir.Constant(_vector(width, _INT32), [value] * width)


def _splat(builder: Any, number: Any, width: int) -> Any:
    undefined = ir.Constant(_vector(width), ir.Undefined)
    first = builder.insert_element(undefined, number, _INT32(0))
    return builder.shuffle_vector(first, undefined, _all_int(width, 0))


def _fused(builder: Any, x: Any, y: Any, addend: Any) -> Any:
    """Return x * y + addend; LLVM uses one instruction where the processor has one."""
    product = builder.fmul(x, y, flags=("contract",))
    return builder.fadd(product, addend, flags=("contract",))


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic(prefer_literal=True)
def zeros(_context: Any, width: Any) -> Any:
    def build(_context: Any, _builder: Any, signature: Any, _arguments: Any) -> Any:
        return _all(signature.return_type.width, 0.0)

    return Lanes(width.literal_value)(width), build


@intrinsic
def width_of(_context: Any, lanes: Any) -> Any:
    def build(_context: Any, _builder: Any, _signature: Any, _arguments: Any) -> Any:
        return _INT64(lanes.width)

    return types.int64(lanes), build


@intrinsic
def load(_context: Any, array: Any, index: Any, like: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(
            builder, _row(context, builder, signature.args[0], arguments[0], like.width, arguments[1])
        )

    return like(array, types.int64, like), build


@intrinsic
def store(_context: Any, array: Any, index: Any, lanes: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row = _row(context, builder, signature.args[0], arguments[0], lanes.width, arguments[1])
        builder.store(arguments[2], row).align = 4
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes), build


@intrinsic(prefer_literal=True)
def multiply_rows(
    _context: Any,
    num_rows: Any,
    matrix: Any,
    first: Any,
    strides: Any,
    num_columns: Any,
    rows: Any,
    factors: Any,
    products: Any,
    kept: Any,
    ahead: Any,
) -> Any:
    """Row i of the products becomes kept times itself plus the sum of matrix[i, k] times row k of factors.

    Both are in `rows`, starting at the indices `factors` and `products`; a row has as many numbers as `kept`
    has lanes. matrix[i, k] is the number at first + i * strides[0] + k * strides[1], of any of the four
    types. For each k the cache line of the number at ahead + 8 * k is prefetched. `num_rows` is a literal: so
    many sums are in registers.
    """
    width = kept.width

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, first, strides, num_columns, _, factors, products, kept, ahead = arguments
        row_stride, column_stride = (builder.extract_value(strides, i) for i in range(2))
        number = partial(_element, context, builder, signature.args[1], arguments[1])
        is_half = signature.args[1].dtype == types.int16
        row = partial(_row, context, builder, signature.args[5], arguments[5], width)
        to_rows = [row(builder.add(products, _INT64(i * width))) for i in range(num_rows.literal_value)]
        sums = [cgutils.alloca_once_value(builder, builder.fmul(kept, _load(builder, to))) for to in to_rows]
        with cgutils.for_range(builder, num_columns) as column:
            factor = _load(builder, row(builder.add(factors, builder.mul(column.index, _INT64(width)))))
            _prefetch(builder, number(builder.add(ahead, builder.mul(column.index, _INT64(8)))))
            at = builder.add(first, builder.mul(column.index, column_stride))
            for total in sums:
                scale = _splat(builder, _float_at(builder, number(at), is_half), width)
                builder.store(_fused(builder, scale, factor, builder.load(total)), total)
                at = builder.add(at, row_stride)
        for to, total in zip(to_rows, sums, strict=True):
            builder.store(builder.load(total), to).align = 4
        return context.get_dummy_value()

    index, pair = types.int64, types.UniTuple(types.int64, 2)
    return types.void(num_rows, matrix, index, pair, index, rows, index, index, kept, index), build


@intrinsic(prefer_literal=True)
def multiply_tile(
    _context: Any,
    num_rows: Any,
    tiles: Any,
    tile: Any,
    depth: Any,
    numbers: Any,
    panel: Any,
    bias: Any,
    added: Any,
    product: Any,
    to: Any,
    kept: Any,
    like: Any,
    ahead: Any,
) -> Any:
    """Row i of the product becomes the bias plus the sum of tiles[k, i] times row k of a panel.

    A row of the panel, of the product and of the bias is two vectors of as many lanes as `like` has. The
    panel begins at numbers[panel], the bias at bias[added], and the tile at tiles[tile], [depth, num_rows].
    Row i is stored from product[to + i * kept[0]] on. Rows after row kept[1] are stored in its place, since
    they equal it. For each k the cache line of numbers[ahead[0] + k * ahead[1]] is prefetched. `num_rows` is
    a literal: twice so many sums are in registers.
    """
    width, count = like.width, num_rows.literal_value

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, tile, depth, _, panel, _, added, _, to, kept, _, ahead = arguments
        (row_stride, last), (fetched, step) = (
            [builder.extract_value(pair, i) for i in range(2)] for pair in (kept, ahead)
        )
        factor = partial(_element, context, builder, signature.args[1], arguments[1])
        number = partial(_element, context, builder, signature.args[4], arguments[4])
        of_panel = partial(_two_rows, context, builder, signature.args[4], arguments[4], width)
        of_bias = partial(_two_rows, context, builder, signature.args[6], arguments[6], width)
        of_product = partial(_two_rows, context, builder, signature.args[8], arguments[8], width)
        starts = [_load(builder, row) for row in of_bias(added)]
        sums = [[cgutils.alloca_once_value(builder, start) for start in starts] for _ in range(count)]
        with cgutils.for_range(builder, depth) as k:
            at = builder.add(panel, builder.mul(k.index, _INT64(2 * width)))
            columns = [_load(builder, row) for row in of_panel(at)]
            _prefetch(builder, number(builder.add(fetched, builder.mul(k.index, step))))
            factors = factor(builder.add(tile, builder.mul(k.index, _INT64(count))))
            for i, totals in enumerate(sums):
                scale = _splat(builder, builder.load(builder.gep(factors, [_INT64(i)])), width)
                for column, total in zip(columns, totals, strict=True):
                    builder.store(_fused(builder, scale, column, builder.load(total)), total)
        for i, totals in enumerate(sums):
            is_kept = builder.icmp_signed("<", _INT64(i), last)
            row = builder.select(is_kept, _INT64(i), last)
            to_rows = of_product(builder.add(to, builder.mul(row, row_stride)))
            for to_row, total in zip(to_rows, totals, strict=True):
                builder.store(builder.load(total), to_row).align = 4
        return context.get_dummy_value()

    index, pair = types.int64, types.UniTuple(types.int64, 2)
    arguments = (num_rows, tiles, index, index, numbers, index, bias, index, product, index, pair, like, pair)
    return types.void(*arguments), build


def _two_rows(context: Any, builder: Any, array_type: Any, array: Any, width: int, index: Any) -> list[Any]:
    return [
        _row(context, builder, array_type, array, width, builder.add(index, _INT64(i * width)))
        for i in range(2)
    ]


def _row(context: Any, builder: Any, array_type: Any, array: Any, width: int, index: Any) -> Any:
    element = _element(context, builder, array_type, array, index)
    return builder.bitcast(element, _vector(width).as_pointer())


def _load(builder: Any, row: Any) -> Any:
    vector = builder.load(row)
    vector.align = 4
    return vector


def _float_at(builder: Any, element: Any, is_half: bool) -> Any:
    number = builder.load(element)
    if is_half:
        return builder.fpext(builder.bitcast(number, ir.HalfType()), _FLOAT)
    if isinstance(number.type, ir.IntType) and number.type.width == 8:
        # Its exponent is 120 less than a float32's, so that subnormal numbers come out right, too.
        wide = builder.zext(number, _INT32)
        sign = builder.shl(builder.and_(wide, _INT32(0x80)), _INT32(24))
        rest = builder.shl(builder.and_(wide, _INT32(0x7F)), _INT32(20))
        return builder.fmul(builder.bitcast(builder.or_(sign, rest), _FLOAT), ir.Constant(_FLOAT, 2.0**120))
    if isinstance(number.type, ir.IntType):  # bfloat16 is the upper half of a float32.
        return builder.bitcast(builder.shl(builder.zext(number, _INT32), _INT32(16)), _FLOAT)
    return number


def _prefetch(builder: Any, element: Any) -> None:
    address_type = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [address_type, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
    # It goes into the second-level cache, as the first one is full of what is being read now.
    is_read, locality, is_data = _INT32(0), _INT32(2), _INT32(1)
    builder.call(function, [builder.bitcast(element, address_type), is_read, locality, is_data])


def _of_two(name: str) -> Callable[..., Any]:
    @intrinsic
    def of_two(_context: Any, left: Any, right: Any) -> Any:
        def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments)

        return left(left, right), build

    made: Callable[..., Any] = of_two
    return made


add, subtract, multiply = _of_two("fadd"), _of_two("fsub"), _of_two("fmul")


@intrinsic
def greater(_context: Any, left: Any, right: Any) -> Any:
    """Return the greater number of each lane, or `right` where `left` is NaN."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return left(left, right), build


@intrinsic
def exp(_context: Any, lanes: Any) -> Any:
    """Return e**x to within 2e-7 for x of at most 88.

    Below -87 it is e**-87 (1e-38). NaN stays NaN.
    """

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _exp(builder, arguments[0], lanes.width)

    return lanes(lanes), build


@intrinsic
def tanh(_context: Any, lanes: Any) -> Any:
    """Return the hyperbolic tangent to within 2e-7. NaN stays NaN."""

    def build(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        # It is (e**2x - 1) / (e**2x + 1); x is limited to a value whose tanh is 1.
        width, one, most = lanes.width, _all(lanes.width, 1.0), _all(lanes.width, _TANH_IS_ONE)
        x = builder.select(builder.fcmp_ordered(">", arguments[0], most), most, arguments[0])
        power = _exp(builder, builder.fadd(x, x), width)
        return builder.fdiv(builder.fsub(power, one), builder.fadd(power, one))

    return lanes(lanes), build


def _exp(builder: Any, x: Any, width: int) -> Any:
    lowest = _all(width, _LOWEST)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    # The lowest bits of `rounded` are n, the whole power of two, as an integer.
    rounded = _fused(builder, x, _all(width, _LOG2_E), _all(width, _ROUNDING))
    n = builder.fsub(rounded, _all(width, _ROUNDING))
    r = _fused(builder, n, _all(width, -_LOG_2_HIGH), x)
    r = _fused(builder, n, _all(width, -_LOG_2_LOW), r)
    polynomial = _all(width, _EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        polynomial = _fused(builder, polynomial, r, _all(width, coefficient))
    power = _fused(builder, builder.fmul(polynomial, r), r, r)
    power = builder.fadd(power, _all(width, 1.0))
    integers = _vector(width, _INT32)
    exponent = builder.shl(builder.bitcast(rounded, integers), _all_int(width, _MANTISSA_BITS))
    two_to_n = builder.add(exponent, _all_int(width, _ONE_AS_BITS))
    return builder.fmul(power, builder.bitcast(two_to_n, _vector(width)))
