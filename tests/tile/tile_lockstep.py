"""L1 of many threads in numpy, all in step: each statement is done by every active thread before the next. Races are
not looked for: a store of a statement is seen by the next."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewright.tile import numbers
from tilewright.tile.dtypes import DType, boolean, int32
from tilewright.tile.ir import thread_ir as l1
from tilewright.tile.ir.thread_ir import Function, Type


def _kind(dtype: DType) -> Any:
    return np.float32 if dtype.floating else dtype.storage


class Lockstep:
    """One instance. `arguments`: as the interpreter takes them."""

    def __init__(
        self, function: Function, arguments: dict[str, Any], pid: tuple[int, ...], grid: tuple[int, ...]
    ) -> None:
        self.f, self.threads, self.arguments = function, function.threads, arguments
        self.values: dict[str, Any] = {}
        self.memory: dict[str, tuple[np.ndarray, DType]] = {}
        for p in function.parameters:
            raw = arguments.get(p.of)
            if p.kind == "pointer":
                base = raw
                while base.base is not None:
                    base = base.base
                assert p.dtype is not None
                self.memory[p.name] = base.reshape(-1), p.dtype
                continue
            value = {
                "stride": lambda raw=raw, p=p: raw.strides[p.axis] // raw.itemsize,
                "extent": lambda raw=raw, p=p: raw.shape[p.axis],
                "size": lambda raw=raw, p=p: raw.shape[p.axis],
                "scalar": lambda raw=raw: raw,
                "builtin": lambda p=p: (
                    np.arange(self.threads) if p.of == "thread" else (pid if p.of == "pid" else grid)[p.axis]
                ),
            }[p.kind]()
            assert p.dtype is not None
            self.values[p.name] = self._full(np.reshape(value, (-1, 1)), Type(p.dtype))
        for a in function.arrays:
            self.memory[a.name] = np.full(a.elements, 0x55, a.dtype.storage), a.dtype

    def run(self) -> None:
        with np.errstate(all="ignore"):
            self.body(self.f.body, np.ones(self.threads, bool))

    def _full(self, value: Any, type: Type) -> np.ndarray:
        made = np.asarray(value, np.float32 if type.dtype.floating else None)
        return np.broadcast_to(made.astype(_kind(type.dtype)), (self.threads, type.lanes))

    def get(self, operand: Any, type: Type) -> np.ndarray:
        if isinstance(operand, str):
            return np.asarray(self.values[operand])
        kind = np.float32 if type.dtype.floating else type.dtype.storage
        return np.full((self.threads, type.lanes), operand, kind)

    def body(self, body: list[Any], active: np.ndarray) -> None:
        for s in body:
            if isinstance(s, l1.Let):
                self.values[s.name] = self.let(s)
            elif isinstance(s, l1.Declare):
                one = self.get(s.value, s.type).copy()
                self.values[s.name] = [one.copy() for _ in range(s.count)] if s.count else one
            elif isinstance(s, l1.Assign):
                new = self.get(s.value, s.type)
                old = self.values[s.name]
                if s.index is None:
                    self.values[s.name] = np.where(active[:, None], new, old)
                else:
                    k = self.scalar(s.index)
                    old[k] = np.where(active[:, None], new, old[k])
            elif isinstance(s, (l1.Load, l1.Store)):
                self.access(s, active)
            elif isinstance(s, l1.If):
                inside = active & self.get(s.condition, Type(boolean))[:, 0]
                if inside.any():
                    self.body(s.body, inside)
            elif isinstance(s, l1.For):
                lo, hi, step = (self.scalar(b) for b in (s.lo, s.hi, s.step))
                for k in range(lo, hi, step) if step > 0 else ():
                    self.values[s.var] = np.full((self.threads, 1), k, np.int64)
                    self.body(s.body, active)

    def scalar(self, operand: Any) -> int:
        if not isinstance(operand, str):
            return int(operand)
        found = np.unique(self.values[operand])
        assert len(found) == 1, f"{operand} is not uniform"
        return int(found[0])

    def access(self, s: Any, active: np.ndarray) -> None:
        memory, dtype = self.memory[s.memory]
        i64 = np.int64
        lanes = np.arange(s.type.lanes)
        index = np.asarray(
            self.values[s.index] if isinstance(s.index, str) else np.full((self.threads, 1), s.index, i64)
        )
        stride = self.values[s.stride] if isinstance(s.stride, str) else s.stride
        at = index if s.scattered else index + lanes * stride
        at = np.broadcast_to(at, (self.threads, s.type.lanes))
        mask = np.broadcast_to(active[:, None], at.shape)
        if s.count is not None:
            mask = mask & (lanes < (self.values[s.count] if isinstance(s.count, str) else s.count))
        if s.mask is not None:
            mask = mask & (self.values[s.mask] if isinstance(s.mask, str) else s.mask)
        assert (not mask.any()) or (at[mask].min() >= 0 and at[mask].max() < len(memory)), f"beyond {s.memory}: {s}"
        if isinstance(s, l1.Store):
            if s.align and mask.any() and s.stride == 1 and not s.scattered:
                assert (at[active, 0] * dtype.itemsize % s.align == 0).all(), f"{s.memory} is not aligned to {s.align}"
            memory[at[mask]] = dtype.encode(np.broadcast_to(self.get(s.value, s.type), at.shape)[mask])
            return
        kind = _kind(dtype)
        other = np.asarray(s.other if s.count is None else 0, np.float32 if dtype.floating else kind)
        other = dtype.rounded(other) if dtype.floating else other
        found = np.where(mask, dtype.decode(memory[np.where(mask, at, 0)]), other)
        self.values[s.name] = found.astype(kind)

    def let(self, s: l1.Let) -> Any:
        source, op = s.operands or s.type, s.op
        if op == "element":
            return self.values[str(s.args[0])][self.scalar(s.args[1])].copy()
        if op == "select":
            test = self.values[s.args[0]] if isinstance(s.args[0], str) else s.args[0]
            return np.where(test, self.get(s.args[1], s.type), self.get(s.args[2], s.type))
        a = [self.get(x, source) for x in s.args]
        lanes = np.arange(s.type.lanes)
        if op in ("splat", "copy"):
            return np.broadcast_to(a[0], (self.threads, s.type.lanes)).copy()
        if op == "iota":
            return self.get(s.args[0], Type(source.dtype)) + lanes
        if op == "below":
            return lanes < self.get(s.args[0], Type(source.dtype))
        if op == "fold":
            total, function = a[0], numbers.COMBINE[s.mode]
            while total.shape[1] > 1:
                half = total.shape[1] // 2
                total = function(total[:, :half], total[:, half:])
            return total
        if op == "shuffle_xor":
            return a[0][np.arange(self.threads) ^ int(s.args[1])]  # type: ignore[arg-type]
        if op == "cast":
            words = s.mode.split()
            return np.asarray(numbers.cast(a[0], source.dtype, s.type.dtype, words[0], "saturate" in words)).astype(
                _kind(s.type.dtype)
            )
        if op == "bits":
            return np.ascontiguousarray(a[0]).view(_kind(s.type.dtype))
        if op == "philox":
            return numbers.philox(*a)
        if op == "fma":
            return numbers.fma(*a)
        if op == "ldexp":
            return numbers.NumpyBuilder().ldexp(a[0], self.get(s.args[1], Type(int32)))
        if op in ("neg", "abs", "not", "sqrt", "rint"):
            return {"neg": np.negative, "abs": np.abs, "not": np.logical_not, "sqrt": np.sqrt, "rint": np.rint}[op](
                a[0]
            )
        if op in ("min", "max") and s.mode == "second":
            builder = numbers.NumpyBuilder()
            return (builder.least if op == "min" else builder.greatest)(a[0], a[1])
        kind = {"quot": "floordiv", "rem": "mod"}.get(op, op)
        function = numbers.BINARY[kind]
        return np.asarray(function(*a, s.mode or "propagate") if kind in ("min", "max") else function(*a))
