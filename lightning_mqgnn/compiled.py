"""What all compiled loops share: how they are compiled, how they read ahead, and how they write past the caches."""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

CACHE_LINE = 64  # bytes


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a loop that runs without the GIL; its code is kept on disk beside its module, once per machine."""
    return numba.njit(nogil=True, cache=True, error_model="numpy")(function)


def _address(context: Any, builder: Any, signature: Any, arguments: Any, place: int, pointer: ir.Type) -> Any:
    """The address of `array[index]`, which are the arguments at `place` and behind it, as a `pointer`."""
    data = context.make_array(signature.args[place])(context, builder, arguments[place]).data
    offset = context.cast(builder, arguments[place + 1], signature.args[place + 1], types.intp)
    return builder.bitcast(builder.gep(data, [offset]), pointer)


def _compile_prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]` (one-dimensional, contiguous) without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        int32 = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32]), "llvm.prefetch.p0"
        )
        address = _address(context, builder, signature, arguments, 0, byte_pointer)
        # To the L2 cache: a core has many more misses under way to there than to L1.
        builder.call(function, [address, int32(0), int32(2), int32(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


prefetch: Any = intrinsic(_compile_prefetch)


def _compile_stream_line(typing_context: Any, source: Any, begin: Any, out: Any, into: Any) -> Any:
    """`out[into:] = source[begin:]` for the 64 bytes of a cache line, whose place in `out` is aligned, uncached.

    An ordinary store would read the line first, and push out of the caches what is needed sooner. Arrays are
    one-dimensional, contiguous and of one dtype. `streamed` must follow before another thread reads.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), 8).as_pointer()
        read = _address(context, builder, signature, arguments, 0, line)
        written = _address(context, builder, signature, arguments, 2, line)
        store = builder.store(builder.load(read, align=1), written, align=CACHE_LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(source, begin, out, into), generate


def _compile_streamed(typing_context: Any) -> Any:
    """Let all lines that this thread wrote with `stream_line` be seen before what it writes next."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


stream_line: Any = intrinsic(_compile_stream_line)
streamed: Any = intrinsic(_compile_streamed)
