"""L1 as C++, for CPUs and GPUs alike: statements and expressions. What surrounds a body, and what the functions do that
are called here, is the target's business; see `cpu`, `cuda`."""

from __future__ import annotations

import hashlib
import json
import math
import re

import numpy as np

from tilewright.tile.dtypes import DType, boolean, float32, int64
from tilewright.tile.errors import LowerError
from tilewright.tile.instr.record import SCALARS
from tilewright.tile.ir import thread_ir as ir
from tilewright.tile.ir.tile_ir import COMPARISONS

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "quot": "/", "rem": "%",
}  # fmt: skip
CALLS = {
    "abs": "abs_of", "sqrt": "sqrt_of", "fma": "fma_of", "ldexp": "ldexp_of", "floordiv": "floor_div<{}>",
    "mod": "floor_mod<{}>", "philox": "philox", "shl": "shift_left<{}, {}>", "shr": "shift_right<{}, {}>",
}  # fmt: skip
WHOLE = ("", "_some")
"""Ends of the names of functions that may move a vector at once."""


def symbol_of(name: str, text: str) -> str:
    """The symbol of a kernel: with a hash of all that it is made of, so that two never share one."""
    plain = re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_") or "kernel"  # `<lambda>` is one
    return f"tile_{plain}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def c_type(type: ir.Type) -> str:
    if type.lanes == 1:
        return SCALARS[type.dtype.name]
    return "i32v" if type.dtype == boolean else SCALARS[type.dtype.name] + "v"


def element(dtype: DType) -> str:
    """The C++ type of an element in memory."""
    return "u8" if dtype == boolean else SCALARS[dtype.name]


def literal(value: ir.Operand, dtype: DType) -> str:
    """A constant of a dtype."""
    if dtype == boolean:
        return "true" if value else "false"
    if dtype == float32:
        number = float(value)
        if math.isnan(number):
            return "NOT_A_NUMBER"
        if math.isinf(number):
            return "-INFINITE" if number < 0 else "INFINITE"
        return f"{number.hex()}f"
    if dtype == int64:
        return str(value) if abs(int(value)) < 1 << 31 else f"(i64){value}ll" if value != -(1 << 63) else "INT64_LEAST"
    if dtype.name == "uint32":
        return f"{value}u"
    return f"(i32){value}" if value == -(1 << 31) else str(value)


def operand(value: ir.Operand, type: ir.Type) -> str:
    """An operand of this type; constants of vectors are spread out."""
    if isinstance(value, str):
        return value
    text = literal(value, type.dtype)
    if type.lanes == 1:
        return text
    name = SCALARS[type.dtype.name]
    if type.dtype not in (float32, boolean) and not type.dtype.computes:
        return f"({name}v{{}} + ({name}){value!r})"  # storage: only ever 0 is asked for
    return f"splat(({name}){text})" if type.dtype != float32 else f"splat({text})"


def expression(s: ir.Let) -> str:
    """The right-hand side of a Let."""
    source = s.operands or s.type
    if s.op == "element":
        return f"{s.args[0]}[{s.args[1]}]"
    if s.op == "select":
        return _select(s)
    if s.op == "shuffle_xor":
        return f"shuffle_xor({s.args[0]}, {s.args[1]})"
    args = [operand(a, source) for a in s.args]
    if s.op == "copy":
        return args[0]
    if s.op in ("splat", "iota", "fold") and s.type.lanes == source.lanes == 1:  # a vector is a scalar
        return args[0]
    if s.op == "splat":
        plain = source.dtype.computes or source.dtype == boolean
        return f"splat({args[0]})" if plain else f"{c_type(s.type)}{{}} + {args[0]}"
    if s.op == "iota":
        return f"PLACES + {args[0]}"
    if s.op == "below":
        return f"lanes_below({args[0]})" if s.type.lanes > 1 else f"0 < {args[0]}"
    if s.op == "fold":
        return f"fold_{s.mode}({args[0]})" + (" != 0" if s.type.dtype == boolean else "")
    if s.mode == "fast":
        return f"{s.op}_fast({args[0]})"
    if s.op == "cast":
        return _cast(s, source, args[0])
    if s.op == "bits":
        to = c_type(s.type)
        return f"({to}){args[0]}" if s.type.lanes > 1 else f"__builtin_bit_cast({to}, {args[0]})"
    by = s.args[-1]
    far = s.op in ("shl", "shr") and (isinstance(by, str) or not 0 <= by < 8 * source.dtype.itemsize)
    if s.op in INFIX and not far:
        if s.type.lanes > 1 and source.dtype == float32 and any(isinstance(a, str) for a in s.args):
            args = [t if isinstance(a, str) or not math.isfinite(a) else literal(a, float32)
                    for a, t in zip(s.args, args, strict=True)]  # finite scalars spread by themselves  # fmt: skip
        text = f"{args[0]} {INFIX[s.op]} {args[1]}"
        return f"mask_of({text})" if s.op in COMPARISONS and s.type.lanes > 1 and source.dtype == int64 else text
    if s.op in ("max", "min"):
        kind = "of" if not source.dtype.floating or s.mode == "second" else "any" if s.mode == "ignore" else "nan"
        return f"{s.op}_{kind}<{c_type(s.type)}>({', '.join(args)})"
    if s.op in ("neg", "not"):
        return ("-" if s.op == "neg" else "~" if s.type.lanes > 1 else "!") + args[0]
    if s.op in CALLS:
        return f"{CALLS[s.op].format(c_type(s.type), SCALARS[s.type.dtype.name])}({', '.join(args)})"
    raise LowerError(f"C++ has no {s.op}", s.line)


_TEST = ir.Type(boolean)


def _select(s: ir.Let) -> str:
    a, b = (operand(x, s.type) for x in s.args[1:])
    test = operand(s.args[0], _TEST)
    if any(isinstance(x, float) and str(x) == "-0.0" for x in s.args[1:]):
        return f"select_bits<{c_type(s.type)}>({test}, {a}, {b})"
    return f"select_of<{c_type(s.type)}>({test}, {a}, {b})" if s.type.lanes > 1 else f"{test} ? {a} : {b}"


def _cast(s: ir.Let, source: ir.Type, arg: str) -> str:
    target, origin = s.type.dtype, source.dtype
    if origin == float32 and target.integer:
        return f"{target}_of_float32_{'nearest' if 'nearest' in s.mode else 'zero'}({arg})"
    whole = origin.integer and target.integer
    narrower = origin == float32 and target.floating and target.name != "float8_e4m3fn"  # which saturates anyway
    if "saturate" in s.mode and (whole or narrower):
        low, high = -target.largest, target.largest
        if whole:
            low, high = max(target.bounds[0], origin.bounds[0]), min(target.bounds[1], origin.bounds[1])
        kind = f"{'of' if whole else 'nan'}<{c_type(source)}>"
        arg = f"min_{kind}(max_{kind}({arg}, {operand(low, source)}), {operand(high, source)})"
    return f"{target}_of_{origin}({arg})"


def statements(body: list[ir.Statement], indent: int, where: bool) -> list[str]:
    """A body, one statement a line; `where`: with the author's line in a comment where it changes."""
    out: list[str] = []
    last = None
    for s in body:
        line = getattr(s, "line", None) or last
        comment = f"  // {line}" if where and line != last else ""
        last, (first, *rest) = line, _statement(s, where)
        out += [" " * indent + text for text in (first + comment, *rest)]
    return out


def _statement(s: ir.Statement, where: bool) -> list[str]:
    if isinstance(s, (ir.Let, ir.Load)):
        return [f"const {c_type(s.type)} {s.name} = {expression(s) if isinstance(s, ir.Let) else _load(s)};"]
    if isinstance(s, ir.Store):
        return [_store(s)]
    if isinstance(s, ir.Declare):
        value = operand(s.value, s.type)
        if s.count:
            each = f"UNROLL({s.count}) for (int r = 0; r < {s.count}; r++)"
            return [f"{c_type(s.type)} {s.name}[{s.count}]; {each} {s.name}[r] = {value};"]
        return [f"{c_type(s.type)} {s.name} = {value};"]
    if isinstance(s, ir.Assign):
        place = s.name if s.index is None else f"{s.name}[{s.index}]"
        return [f"{place} = {operand(s.value, s.type)};"]
    if isinstance(s, ir.If):
        return [f"if ({s.condition}) {{", *statements(s.body, 2, where), "}"]
    if isinstance(s, ir.Print):
        return [_print(s)]
    if isinstance(s, ir.Wait):
        return ["copies_wait();"]
    if isinstance(s, ir.Barrier):
        return [f"{s.scope}_barrier();" + (f"  // {s.why}" if where and s.why else "")]
    head = f"for (i64 {s.var} = {s.lo}; {s.var} < {s.hi}; {s.var} += {s.step}) {{"
    if s.any_step:
        first, more = f"{s.step} > 0 ? {s.lo} : {s.hi}", f"(u64){s.hi} - (u64){s.var} > (u64){s.step}"
        head = f"for (i64 {s.var} = {first}; {s.var} < {s.hi}; {s.var} = {more} ? {s.var} + {s.step} : {s.hi}) {{"
    if s.unroll:
        head = f"UNROLL({s.hi}) for (int {s.var} = 0; {s.var} < {s.hi}; {s.var}++) {{"
    return [head, *statements(s.body, 2, where), "}"]


def _place(s: ir.Load | ir.Store) -> str:
    return s.memory if s.index == 0 else f"{s.memory} + {s.index}"


def _reached(s: ir.Load | ir.Store) -> tuple[str, list[ir.Operand]]:
    """How a vector is reached: the end of the function's name, and what it is given."""
    if s.scattered:
        return ("_at", [s.memory, s.index]) if s.mask is None else ("_at_where", [s.memory, s.index, s.mask])
    if s.mask is not None:
        return "_where", [_place(s), s.stride, s.mask]
    if s.count is not None:
        return "_some", [_place(s), s.count]
    return ("_every", [_place(s), s.stride]) if s.stride != 1 else ("", [_place(s)])


def _vector(s: ir.Load | ir.Store, end: str) -> str:
    """The type of a vector in memory, and its alignment, where a function asks for that."""
    vector = "u8v" if s.type.dtype == boolean else c_type(s.type)
    return f"{vector}, {s.align}" if s.align and end in WHOLE else vector


def _load(s: ir.Load) -> str:
    if s.type.lanes == 1:
        text = f"{s.memory}[{s.index}]"
        if s.mask is not None:
            text = f"{operand(s.mask, _TEST)} ? {text} : {_other(s)}"
        return f"({text}) != 0" if s.type.dtype == boolean else text
    end, given = _reached(s)
    if s.mask is not None:
        given.append(f"({element(s.type.dtype)}){_other(s)}")
    text = f"load{end}<{_vector(s, end)}>({', '.join(map(str, given))})"
    return f"mask_of_bytes({text})" if s.type.dtype == boolean else text


def _store(s: ir.Store) -> str:
    if s.source:
        return f"copy_async<{s.align}>({_place(s)}, {s.source} + {s.value}{'' if s.count is None else f', {s.count}'});"
    value = operand(s.value, s.type)
    if s.type.lanes == 1:
        text = f"{s.memory}[{s.index}] = {value};"
        return text if s.mask is None else f"if ({operand(s.mask, _TEST)}) {text}"
    end, given = _reached(s)
    given.insert(1 if end == "_some" else len(given), f"bytes_of_mask({value})" if s.type.dtype == boolean else value)
    typed = f"<{_vector(s, end)}>" if end in WHOLE else ""
    return f"store{end}{typed}({', '.join(map(str, given))});"


def _print(s: ir.Print) -> str:
    value = operand(s.value, s.type) + ("[l]" if s.type.lanes > 1 else "")
    real = s.type.dtype.floating
    value = f"(double)({value} != {value} ? NOT_A_NUMBER : {value})" if real else f"(i64)({value})"  # some NaN are -nan
    value = f"(i64)({value} != 0)" if s.type.dtype == boolean else value
    place = [f"(i64){p}" + (" + l" if i == s.along and s.type.lanes > 1 else "") for i, p in enumerate(s.place)]
    text = json.dumps(s.format + "\n")
    line = f"print_line({text}, {', '.join([*place, value])});"
    return f"for (int l = 0; l < {s.count or s.type.lanes}; l++) {line}" if s.type.lanes > 1 else line


def _other(s: ir.Load) -> str:
    """What a masked-off element is, in the bits of memory."""
    dtype = s.type.dtype
    if dtype == float32:
        return literal(s.other, dtype)
    bits = dtype.encode(np.asarray(s.other, dtype.values))
    return str(int((bits.view(np.uint16) if dtype.name == "float16" else bits).item()))
