"""Call classes: what of a call may change which kernel is right (the layout class) or fast (the call class).

Both are readable strings, since they are kept in files and shown to people. Row counts enter a call class only by the
power of two above them, and a layout class not at all.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.core import registry
from tilewright.core.call import DTYPE_NAMES, Call, TensorFacts


def layout_class(call: Call, defaults: dict[str, Any]) -> str:
    """dtypes, column bucket, strides and alignment of each input, what is absent, options: the key of evidence."""
    forms = _forms(call)
    parts = [_layout(name, facts, _has_columns(call, name)) + forms.get(name, "") for name, facts in _inputs(call)]
    return " ".join([*parts, *_options(call, defaults), *(["in place"] if call.aliased else [])])


def call_class(call: Call, defaults: dict[str, Any]) -> str:
    """The layout class with exact columns and bucketed rows: the key of tuned times and of memoised selections. In
    place or not is no part of it: the same bytes move, and the same kernel is to give the same bits."""
    parts, forms = [], _forms(call)
    for name, facts in _inputs(call):
        columns = _has_columns(call, name)
        leading = facts.shape[:-1] if _stands_apart(call, name) else (facts.rows,)
        rows = ",".join(str(_bucket(n)) for n in leading)
        sizes = f"[{rows},{facts.columns}]" if columns else f"[{_bucket(facts.numel)}]"
        parts.append(_layout(name, facts, columns) + forms.get(name, "") + sizes)
    return " ".join([*parts, *_options(call, defaults)])


def _inputs(call: Call) -> list[tuple[str, TensorFacts]]:
    return [(name, facts) for name, facts in call.tensors.items() if name not in call.outputs and facts]


def _forms(call: Call) -> dict[str, str]:
    """Of inputs that come in several shapes, what tells the less usual ones apart."""
    inputs = {name: facts.shape for name, facts in _inputs(call)}
    return {name: f".{form.replace(' ', '')}" for name, form in registry.op(call.op).probes.unusual(inputs).items()}


def _has_columns(call: Call, name: str) -> bool:
    """False for one number a row (statistics): their last dimension counts rows."""
    return not registry.op(call.op).probes.is_vector(name)


def _stands_apart(call: Call, name: str) -> bool:
    """Whether the op names several leading dimensions: heads and positions are not rows alike."""
    return len(registry.op(call.op).probes.dims.get(name, "").partition("|")[0].split()) > 2


def _layout(name: str, facts: TensorFacts, columns: bool) -> str:
    if not columns:
        spaced = "" if facts.contiguous else ".spaced" if len(facts.steps) == 1 else f".spaced{len(facts.steps)}"
        return f"{name}={DTYPE_NAMES.get(facts.dtype, facts.dtype)}.v{facts.align}{spaced}"
    if facts.numel and all(s == 0 for s in facts.stride) and facts.shape:
        strides = "expanded"
    elif facts.column_stride != 1:
        strides = "strided"
    else:
        levels = facts.row_levels
        rows = "d" if len(levels) == 1 and levels[0][1] == facts.columns else f"r{len(levels)}"
        rows += "e" if any(not step for _, step in levels) else ""  # hardware copies need steps
        strides = f"{rows}v{facts.vector_bytes()}"
    width = facts.columns
    exact = "" if width == _bucket(width) else "-"
    return f"{name}={DTYPE_NAMES.get(facts.dtype, facts.dtype)}.{strides}.c{_bucket(width)}{exact}"


def _options(call: Call, defaults: dict[str, Any]) -> list[str]:
    found = [f"{n}={_option(v)}" for n, v in call.options.items() if _option(v) != _option(defaults[n])]
    return [*found, *(["saving"] if call.saving else []), *(["deterministic"] if call.deterministic else [])]


def _option(value: Any) -> str:
    """Numbers are run-time arguments: only whether they are zero may choose another kernel."""
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value, str(value))
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float)):
        return "0" if value == 0 else "any"
    if isinstance(value, (tuple, list)):
        return "".join("1" if v is True else "0" if v is False else str(v) for v in value)
    return str(value)


def _bucket(n: int) -> int:
    """The power of two at or above n."""
    return 1 << max(n - 1, 0).bit_length()
