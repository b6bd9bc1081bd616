"""Markdown tables from the raw measurements under benchmarks/results/<device>/*.json.

Prints them, writes them between the `<!-- results -->` markers of README.md and docs/benchmarks.md (`--write`), or
checks that they are in step (`--check`). It measures nothing and knows no op: it formats what `tilewright bench` wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- results -->", "<!-- /results -->"
NOTHING = "No measurements are committed yet."
LEGEND = (
    "Kernel time: CUDA-graph replay, inputs rotated so that they come from memory; ± is the interquartile range. "
    "Of copy: fewest bytes over time over the measured copy rate, or operations over the matrix rate where these take "
    "longer (attention, linear). Peer: the fastest rival in the same process; its "
    "time over ours with the 95 % interval, so above 1 is faster than the peer."
)


@dataclass(frozen=True)
class Row:
    """One measured kernel, as `bench --json` writes it, with its machine."""

    device: str
    software: dict[str, Any]
    copy_tb_s: float | None
    facts: dict[str, Any]

    @property
    def work(self) -> tuple[Any, ...]:
        """What was computed: rows of equal `work` compete."""
        f = self.facts
        return self.device, f["op"], f["pass"], tuple(f["shape"]), f["dtype"], f["workload"], f["cache"]

    @property
    def time(self) -> float:
        """What it is ranked by; infinite where there is no time or no proof."""
        measured = self.facts["kernel_us"]
        return float(measured) if measured is not None and self.facts["verified"] else float("inf")


def read(folder: Path) -> list[Row]:
    """The best proven row of each backend for each work; a later file (by name) replaces what an earlier one says."""
    rows: dict[tuple[Any, ...], Row] = {}
    for path in sorted(folder.glob("*/*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or "copy_tb_s" not in data:
            continue  # another kind of record
        best: dict[tuple[Any, ...], Row] = {}
        try:
            for facts in data["results"]:
                row = Row(_text(data["device"]), data["software"], data["copy_tb_s"], facts)
                key = (*row.work, facts["backend"])
                if row.time < (best[key].time if key in best else float("inf")):
                    best[key] = row
        except (KeyError, TypeError) as error:
            raise SystemExit(f"{path}: not what `bench --json` writes: {type(error).__name__}: {error}") from error
        rows |= best
    return list(rows.values())


def table(rows: list[Row], *, every_backend: bool) -> str:
    """One section a device. `every_backend`: a line for each; otherwise the fastest kernel, cold, for the first work
    that is recorded of each op and pass."""
    if not rows:
        return NOTHING
    alike = Counter(_shape(row) for row in {row.work: row for row in rows}.values())
    if not every_backend:
        cold = [row for row in rows if row.facts["cache"] != "hot"]
        fastest: dict[tuple[Any, ...], Row] = {}
        for row in cold or rows:
            if row.time < (fastest[row.work].time if row.work in fastest else float("inf")):
                fastest[row.work] = row
        first: dict[tuple[Any, ...], Any] = {}
        for row in fastest.values():
            first.setdefault((row.device, row.facts["op"], row.facts["pass"]), row.work)
        rows = [row for row in fastest.values() if row.work in first.values()]
    parts = []
    for device in dict.fromkeys(row.device for row in rows):
        mine = [row for row in rows if row.device == device]
        rates = sorted({row.copy_tb_s for row in mine if row.copy_tb_s is not None})
        software = _text({name: version for row in mine for name, version in row.software.items()})
        rate = (
            f"; device copy {' to '.join(f'{r:.2f}' for r in dict.fromkeys((rates[0], rates[-1])))} TB/s"
            if rates
            else ""
        )
        parts.append(f"**{device}** ({software}{rate})\n")
        parts.append(
            "| op | pass | shape | dtype | kernel | kernel µs | of copy | call µs | best peer | times as fast |"
        )
        parts.append("|---|---|---|---|---|---:|---:|---:|---|---|")
        parts.extend(_line(row, every_backend, alike[_shape(row)] > 1) for row in sorted(mine, key=_order))
        parts.append("")
    return "\n".join([*parts, LEGEND])


def _order(row: Row) -> tuple[Any, ...]:
    f = row.facts
    return f["op"], f["pass"] != "forward", f["dtype"], [-n for n in f["shape"]], f["cache"] != "cold", row.time


def _shape(row: Row) -> tuple[Any, ...]:
    """What tells works apart in a table, if nothing else has to."""
    f = row.facts
    return row.device, f["op"], f["pass"], *f["shape"], f["dtype"], f["cache"]


def _line(row: Row, with_config: bool, with_workload: bool) -> str:
    f = row.facts
    shape = "×".join(map(str, f["shape"])) + (" hot" if f["cache"] == "hot" else "")
    shape += f", {f['workload'].partition(':')[0]}" if with_workload else ""
    kernel = f["backend"] + (f" {_text(f['config'])}" if f["config"] and with_config else "")
    spread = f" ± {f['iqr_us']:.1f}" if f["iqr_us"] is not None else ""
    of_copy = "" if f["sol"] is None or f["cache"] == "hot" else f"{f['sol']:.2f}"
    call = "" if f["call_us"] is None else f"{f['call_us']:.1f}"
    peer, ratio = "", ""
    if f["peer"]:
        peer = f["peer"] + ("" if f["peer_us"] is None else f" {f['peer_us']:.1f}")
        if f["ratio_ci"] is not None:
            low, high = f["ratio_ci"][0], f["ratio_ci"][-1]
            ratio = f"{low:.2f} to {high:.2f}"
    cells = [
        f"`{f['op']}`",
        f["pass"],
        shape,
        f["dtype"],
        kernel,
        f"{f['kernel_us']:.1f}{spread}",
        of_copy,
        call,
        peer,
        ratio,
    ]
    return "| " + " | ".join(cells) + " |"


def _text(value: Any) -> str:
    """Names and versions, whether bench wrote a string or an object."""
    if isinstance(value, dict):
        if "name" in value:
            return f"{value['name']} ({value['arch']})" if value.get("arch") else str(value["name"])
        return " ".join(f"{k}={v}" if isinstance(v, int) else f"{k} {v}" for k, v in value.items() if v)
    return str(value)


def filled(text: str, content: str) -> str:
    """`text` with `content` between the markers."""
    head, start, rest = text.partition(START)
    _, end, tail = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"the markers {START} and {END} are missing")
    return f"{head}{START}\n{content}\n{END}{tail}"


def targets(rows: list[Row]) -> dict[Path, str]:
    """Each page with what it should hold."""
    pages = {ROOT / "README.md": False, ROOT / "docs" / "benchmarks.md": True}
    return {p: filled(p.read_text(encoding="utf-8"), table(rows, every_backend=every)) for p, every in pages.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="fill the pages")
    action.add_argument("--check", action="store_true", help="exit 1 where a page is out of step")
    parser.add_argument("--all", action="store_true", help="print every backend, not the fastest alone")
    options = parser.parse_args()

    rows = read(RESULTS)
    if not (options.write or options.check):
        print(table(rows, every_backend=options.all))
        return 0
    stale = {path: text for path, text in targets(rows).items() if path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if options.write:
            path.write_text(text, encoding="utf-8")
        print(
            f"{'wrote' if options.write else 'out of step, run `make table`:'} {path.relative_to(ROOT)}",
            file=sys.stderr,
        )
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
