"""Checks on first use: seeded probes of the call's own class, at most 64 MiB, before a kernel serves its first call.

The caller's tensors are never touched, no generator advances, grad and dispatch modes are off. `check="always"` is here
too: it compares the caller's own call with the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tilewright.core import evidence, registry
from tilewright.core.call import Call, TensorFacts
from tilewright.core.errors import CheckFailed
from tilewright.core.evidence import Verdict
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.verify.cases import Case, build, extent_of, forms_of, main_of, other_dtypes
from tilewright.verify.check import Outcome, add_to_pool, check, judge, judge_pool, truth_of
from tilewright.verify.script import write_script

PROBE_BYTES = 64 << 20
VALUES = ("normal", "offset", "nan")


@contextmanager
def on_threads_that_are_there(kernel: Kernel) -> Iterator[None]:
    """A check, which nobody asked for, must not wait for threads that a process lacks: the backends of the two that it
    compares know."""
    threads = torch.get_num_threads()
    if threads == 1 or not any(registry.backend(name).serial() for name in {kernel.backend, "reference"}):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def prove(kernel: Kernel, config: Config, call: Call, *, again: bool = True) -> Verdict:
    """Check `kernel` on probes of the class of `call`. Compile and launch errors propagate.

    `again`: a pooled error beyond its limit is looked at a second time, since only what comes again is kept.
    """
    op = registry.op(call.op)
    where = torch.device("cuda", call.device.index) if call.device.is_gpu else torch.device("cpu")
    emulated = registry.backend(kernel.backend).emulates(call.device)
    how = {"saving": call.saving, "emulated": emulated, "in_place": bool(call.aliased)}
    pool: dict[str, Any] = {}
    count = 0
    apart = torch.random.fork_rng(devices=[])
    with torch.no_grad(), _disable_current_modes(), apart, on_threads_that_are_there(kernel):
        for case in probes(call, tiny=emulated):
            try:
                inputs = build(case, op, where)
                options = dict(case.options)
                truth = truth_of(op, inputs, options, call.saving)
                outcome = check(kernel, config, op, inputs, options, truth, **how)
                # only a wrong result that comes again is kept
                repeat = check(kernel, config, op, inputs, options, truth, **how) if outcome.problems else outcome
            except (torch.OutOfMemoryError, MemoryError) as error:
                return Verdict(None, count, call.device.arch, evidence.today(), f"out of memory: {error}")
            count += 1
            add_to_pool(pool, outcome)
            if outcome.problems:
                script = write_script(kernel, config, case, outcome.problems, where)
                known = (repeat.problems or outcome.problems)[0]
                detail = f"{known}; reproduce with {script}"
                return Verdict(False if repeat.problems else None, count, call.device.arch, evidence.today(), detail)
        problems = judge_pool(pool, emulated)
    if problems and again:
        second = prove(kernel, config, call, again=False)
        return (
            second if second.passed is False else Verdict(None, count, call.device.arch, evidence.today(), problems[0])
        )
    if problems:
        return Verdict(False, count, call.device.arch, evidence.today(), problems[0])
    return Verdict(True, count, call.device.arch, evidence.today())


def probes(call: Call, *, tiny: bool = False) -> list[Case]:
    """Cases of the call's class: its columns, dtypes, options and layouts, few and many rows, three kinds of values."""
    op = registry.op(call.op)
    main, extent = main_of(call), op.probes.bearable(extent_of(call))
    wide = sum(f.columns * f.dtype.itemsize for n, f in call.tensors.items() if f is not None and f.shape)
    most = max(1, PROBE_BYTES // (wide * 6))  # float64 copies are made of everything
    many = min(math.prod(extent.lead), 3 if tiny else 257, most)
    layouts = {n: _layout(f, op.probes.is_vector(n)) for n in op.tensors if (f := call.tensors[n]) is not None}
    if not call.anywhere:
        layouts |= dict.fromkeys(call.aliased.values(), "")  # rows of any width begin where memory does
    sizes = op.probes.cut(extent.sizes, most)
    absent = tuple(n for n in op.tensors if call.tensors[n] is None)
    found = []
    for place, values in enumerate(VALUES):
        for count in sorted({1, many}):
            lead = (count, 1) if any(v == "heads" for v in layouts.values()) else (count,)
            lead = (max(1, count // 2), 2) if len(lead) == 2 else lead
            found.append(
                Case("first use", call.op, lead, extent.columns, main.dtype, dict(call.options), absent,
                     other_dtypes(call), layouts, values, seed=place, sizes=sizes, forms=forms_of(call))
            )  # fmt: skip
    return found


def _layout(facts: TensorFacts, vector: bool) -> str:
    """The generator's word for the strides and alignment of this tensor; of a vector, one number a row, for strides."""
    if facts.numel and all(s == 0 for s in facts.stride) and not (vector and facts.contiguous):
        return "expanded"
    if vector:
        return "" if facts.contiguous else "columns"
    if facts.column_stride != 1:
        return "columns"
    if len(facts.row_levels) > 1:
        return "heads"
    step = facts.vector_bytes() // facts.dtype.itemsize
    if facts.vector_bytes() < 16:
        return f"offset {max(step, 1)}"
    return "" if facts.contiguous else f"padded {16 // facts.dtype.itemsize}"


def compare(call: Call, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """`check="always"`: judge what a kernel returned for the caller's own call.

    Raises:
        CheckFailed: with the output, its largest error and the limit.
    """
    op = registry.op(call.op)
    with torch.no_grad():
        named: dict[str, Tensor | None] = dict(zip(op.tensors, inputs, strict=True))
        truth = truth_of(op, named, call.options, call.saving)
        outcome = Outcome()
        for name, found in zip([*op.out, *(op.saved if call.saving else ())], outputs, strict=True):
            if found is not None:
                judge(outcome, name, found, truth, False, statistic=name in op.saved)
    if outcome.problems:
        raise CheckFailed(f"{call.op}: {'; '.join(outcome.problems)}")
