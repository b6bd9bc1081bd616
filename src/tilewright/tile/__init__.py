"""The tile compiler: one tile-level source for C++ on CPUs and CUDA C++ on GPUs. A library of its own: numpy and the
standard library are all it needs.

    from tilewright import tile

    @tile.kernel(static={"x": (1,)})
    def rms_norm(t, x, w, y, eps): ...

Authors write with `t` (`lang.functions`), fragments (`lang.kernel`) and what `lang.library` holds.
"""

from tilewright.tile.dtypes import bfloat16, boolean, float8_e4m3fn, float16, float32, int8, int32, int64, uint8, uint32
from tilewright.tile.errors import CompilerError, LowerError, RaceError, RunError, TileError, TraceError, VerifyError
from tilewright.tile.explain import explain
from tilewright.tile.fuse import Decision, decide
from tilewright.tile.ir.tile_ir import Most, ViewType
from tilewright.tile.lang.kernel import Fragment, Kernel, fragment, kernel
from tilewright.tile.lang.library import softmax, store_as
from tilewright.tile.runtime.launch import launch

Kernel.on = launch

__all__ = [
    "CompilerError", "Decision", "Fragment", "Kernel", "LowerError", "Most", "RaceError", "RunError", "TileError",
    "TraceError", "VerifyError", "ViewType", "bfloat16", "boolean", "decide", "explain", "float8_e4m3fn", "float16",
    "float32", "fragment", "int8", "int32", "int64", "kernel", "softmax", "store_as", "uint8", "uint32",
]  # fmt: skip
