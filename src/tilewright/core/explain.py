"""A selection as a table for people: every candidate, its config, times, evidence, and why it was not chosen."""

from __future__ import annotations

from tilewright.core import evidence
from tilewright.core.selection import Candidate, Selection


def render(selection: Selection) -> str:
    call = selection.call
    inputs = [f for name, f in call.tensors.items() if f is not None and name not in call.outputs]
    mode = "captured or compiled" if selection.metric == "kernel_us" else "eager"
    gradient = "gradient" if call.saving else "no gradient"
    lines = [f"{call.form}   {', '.join(str(f) for f in inputs)}      {call.device}      {mode}, {gradient}"]
    rows = [_row(candidate, candidate is selection.chosen, call.device.arch) for candidate in selection.candidates]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:  # a column that is empty in every row takes no room
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip())
    lines.append(f"chosen: {selection.why}")
    lines += [f"note: {note}" for note in selection.notes]
    return "\n".join(lines)


def _row(candidate: Candidate, chosen: bool, arch: str) -> list[str]:
    time = candidate.time
    name = candidate.kernel.backend + (f"/{candidate.kernel.label}" if candidate.kernel.label else "")
    if candidate.reasons:
        standing = "; ".join(str(reason) for reason in candidate.reasons)
    elif candidate.kernel.backend == "reference":
        standing = "the definition"
    elif candidate.verdict is None:
        standing = "no evidence yet: checked on first use"
    else:
        count = candidate.verdict.cases
        source = "shipped" if candidate.verdict.shipped else candidate.verdict.date
        standing = f"proven on {candidate.verdict.where}, {count} case{'s' * (count != 1)}, {source}"
    if candidate.fits and (against := evidence.against(candidate.kernel, arch)):
        standing += f"; elsewhere wrong: {against}"
    return [
        " >" if chosen else "  ",
        name,
        str(candidate.config or ""),
        f"{time.call_us:.1f} us call" if time and time.call_us is not None else "",
        f"{time.kernel_us:.1f} us kernel{', rough' if time.busy else ''}" if time else "",
        standing,
    ]
