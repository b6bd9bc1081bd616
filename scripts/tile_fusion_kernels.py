"""The kernels of `tile_fusion_cases.py`, and the fragments that are bound to them."""

from __future__ import annotations

from typing import Any

from tilewright import tile

CHUNK = 1024
BLOCK = 32, 256
"""Rows and columns of an instance of `scaled_blocks`."""
ROWS = 8
"""Rows of an instance of `norm_blocks`."""


# Kernels ---------------------------------------------------------------------------------------------------------


@tile.kernel(static={"x": (1,)})
def norm(t: Any, x: Any, w: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[at]).f32()
    v = prologue(t, v, at) if prologue else v
    epilogue(t, v * t.rsqrt(t.mean(v * v) + 1e-6) * t.load(w[at[1]]).f32(), at)


@tile.kernel(static={"x": (1,)})
def softmax(t: Any, x: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[at]).f32()
    epilogue(t, tile.softmax(t, prologue(t, v, at) if prologue else v, accuracy="fast"), at)


@tile.kernel(static={"x": (1,)})
def scaled(t: Any, x: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    v = t.load(x[at]).f32()
    epilogue(t, (prologue(t, v, at) if prologue else v) * 1.5, at)


@tile.kernel(static={"x": (1,)})
def norm_in_chunks(t: Any, x: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    """Two passes over a row that no block holds: what is bound before it is computed in both."""
    row, total = t.program_id(0), t.var(0.0)
    for k in t.range(0, x.most(1), CHUNK):
        at = row, k + t.arange(CHUNK)
        v = prologue(t, t.load(x[at]).f32(), at)
        total.set(total.get() + t.sum(v * v))
    root = t.rsqrt(total.get() / x.most(1) + 1e-6)
    for k in t.range(0, x.most(1), CHUNK):
        at = row, k + t.arange(CHUNK)
        epilogue(t, prologue(t, t.load(x[at]).f32(), at) * root, at)


@tile.kernel(static={"x": (1,)})
def heads(t: Any, x: Any, w: Any, y: Any, prologue: Any = None) -> None:
    """A row times each of a few vectors, an instance each: what is bound before it is computed by all of them."""
    row, head = t.program_id(0), t.program_id(1)
    at = row, t.arange(x.shape[1])
    v = prologue(t, t.load(x[at]).f32(), at)
    t.store(y[row, head], t.sum(v * t.load(w[head, at[1]]).f32()))


@tile.kernel(static={"x": (1,)})
def scaled_blocks(t: Any, x: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    """Rows and columns by blocks, so that an instance has neighbours of memory that lies either way."""
    at = (t.program_id(0) * BLOCK[0] + t.arange(BLOCK[0])[:, None],
          t.program_id(1) * BLOCK[1] + t.arange(BLOCK[1])[None, :])  # fmt: skip
    v = t.load(x[at]).f32()
    epilogue(t, (prologue(t, v, at) if prologue else v) * 1.5, at)


@tile.kernel(static={"x": (1,)})
def norm_blocks(t: Any, x: Any, w: Any, prologue: Any = None, epilogue: Any = tile.store_as) -> None:
    """Some rows an instance."""
    at = t.program_id(0) * ROWS + t.arange(ROWS)[:, None], t.arange(x.shape[1])[None, :]
    v = t.load(x[at]).f32()
    v = prologue(t, v, at) if prologue else v
    epilogue(t, v * t.rsqrt(t.mean(v * v)[:, None] + 1e-6) * t.load(w[at[1]]).f32(), at)


# Prologues -------------------------------------------------------------------------------------------------------


def gelu_of(t: Any, v: Any, accuracy: str) -> Any:
    return v * t.sigmoid(1.5957691216057308 * v * (1.0 + 0.044715 * v * v), accuracy)


@tile.fragment
def add(t: Any, v: Any, at: Any, other: Any) -> Any:
    return v + t.load(other[at]).f32()


@tile.fragment
def add_kept(t: Any, v: Any, at: Any, other: Any, total: Any) -> Any:
    s = (v + t.load(other[at]).f32()).to(total.dtype)
    t.store(total[at], s)
    return s.f32()


@tile.fragment
def gated(t: Any, v: Any, at: Any, up: Any) -> Any:
    return v * t.sigmoid(v, "fast") * t.load(up[at]).f32()


@tile.fragment
def gated_pair(t: Any, v: Any, at: Any, pair: Any) -> Any:
    """Gate and value in turn."""
    gate, up = (t.load(pair[at[0], at[1] * 2 + i]).f32() for i in (0, 1))
    return v + gate * t.sigmoid(gate, "fast") * up


@tile.fragment
def decoded(t: Any, v: Any, at: Any, codes: Any, unit: Any) -> Any:
    code = t.load(codes[at])
    return v + (code.i32().f32() if codes.dtype.integer else code.f32()) * t.load(unit[at[0]])


@tile.fragment
def add_turned(t: Any, v: Any, at: Any, other: Any) -> Any:
    value = t.load(other[at[1], at[0]])
    return v + (value.i32().f32() if other.dtype.integer else value.f32())


@tile.fragment
def embedded(t: Any, v: Any, at: Any, table: Any, token: Any) -> Any:
    return v + t.load(table[t.load(token[at[0]]), at[1]]).f32()


@tile.fragment
def gelu(t: Any, v: Any, at: Any, accuracy: str) -> Any:
    return gelu_of(t, v, accuracy)


@tile.fragment
def dropped(t: Any, v: Any, at: Any) -> Any:
    word = t.random(7, at[1], at[0], 0)
    return t.where((word >> 8).i32().f32() < 0.9 * 16777216.0, v / 0.9, 0.0)


@tile.fragment
def thrice(t: Any, v: Any, at: Any) -> Any:
    """Three exact functions one after the other."""
    return t.log(1.0 + t.exp(t.sqrt(t.abs(v))))


# Epilogues -------------------------------------------------------------------------------------------------------


@tile.fragment
def quantized(t: Any, v: Any, at: Any, codes: Any, unit: Any) -> None:
    most = 127.0 if codes.dtype.integer else 448.0
    s = t.maximum(t.max(t.abs(v)) / most, 1e-10)
    t.store(unit[at[0]], s)
    t.store(codes[at], (v / s).to(codes.dtype, round="nearest_even" if codes.dtype.integer else "", saturate=True))


@tile.fragment
def store_gelu(t: Any, v: Any, at: Any, y: Any, accuracy: str) -> None:
    t.store(y[at], gelu_of(t, v, accuracy).to(y.dtype))


@tile.fragment
def store_gated(t: Any, v: Any, at: Any, up: Any, y: Any) -> None:
    t.store(y[at], (v * t.sigmoid(v, "fast") * t.load(up[at]).f32()).to(y.dtype))


@tile.fragment
def store_sum(t: Any, v: Any, at: Any, other: Any, y: Any) -> None:
    t.store(y[at], (v + t.load(other[at]).f32()).to(y.dtype))


@tile.fragment
def store_dropped(t: Any, v: Any, at: Any, y: Any) -> None:
    word = t.random(7, at[1], at[0], 0)
    t.store(y[at], t.where((word >> 8).i32().f32() < 0.9 * 16777216.0, v / 0.9, 0.0).to(y.dtype))


@tile.fragment
def store_pair(t: Any, v: Any, at: Any, y: Any) -> None:
    """A value and its negative in turn."""
    t.store(y[at[0], at[1] * 2], v.to(y.dtype))
    t.store(y[at[0], at[1] * 2 + 1], (-v).to(y.dtype))


@tile.fragment
def store_turned(t: Any, v: Any, at: Any, y: Any) -> None:
    t.store(y[at[1], at[0]], v.to(y.dtype))


@tile.fragment
def store_softmax(t: Any, v: Any, at: Any, y: Any) -> None:
    t.store(y[at], tile.softmax(t, v, accuracy="fast").to(y.dtype))
