"""What all compiled loops share: how they are compiled, and how they ask for memory ahead of its use."""

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a loop that runs without the GIL; its code is kept on disk beside its module, once per machine."""
    return numba.njit(nogil=True, cache=True, error_model="numpy")(function)


def _compile_prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]` (one-dimensional, contiguous) without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        offset = context.cast(builder, arguments[1], signature.args[1], types.intp)
        byte_pointer = ir.IntType(8).as_pointer()
        int32 = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32]), "llvm.prefetch.p0"
        )
        address = builder.bitcast(builder.gep(data, [offset]), byte_pointer)
        # To the L2 cache: a core has many more misses under way to there than to L1.
        builder.call(function, [address, int32(0), int32(2), int32(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


prefetch: Any = intrinsic(_compile_prefetch)
