"""Instruction records: C++ text of one operation, what the CPU must have for it, and what it relies on.

Of several records of one name the first whose features are there is printed. The last needs none, so an operation can
always be said; that it agrees with the others bit for bit is tested with the features turned off.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tilewright.tile.errors import LowerError

SCALARS = {
    "bool": "bool", "int8": "i8", "uint8": "u8", "int32": "i32", "uint32": "u32", "int64": "i64", "float32": "f32",
    "float16": "u16", "bfloat16": "u16", "float8_e4m3fn": "u8",
}  # fmt: skip
"""The C++ types of scalars, and of memory (but for bool, which is a byte there), by element type."""
INTEGERS = ("int32", "uint32", "int64", "int8", "uint8")


@dataclass(frozen=True)
class Record:
    """`text` defines the function `name`; `needs` are features as the kernel names them in /proc/cpuinfo."""

    name: str
    text: str
    needs: frozenset[str] = frozenset()
    lanes: int = 0
    """The width that it is for; 0 for any."""


def choose(records: Sequence[Record], name: str, features: Iterable[str], lanes: int) -> Record:
    """The first record of this name that the target has."""
    have = set(features)
    for record in records:
        if record.name == name and record.needs <= have and record.lanes in (0, lanes):
            return record
    raise LowerError(f"no instruction record for {name}")


def needed(text: str, records: Sequence[Record], features: Collection[str], lanes: int) -> list[Record]:
    """The records that a text calls, and those that these call, each after what it relies on."""
    names = {r.name for r in records}
    found: dict[str, Record] = {}

    def visit(body: str) -> None:
        for name in sorted(set(re.findall(r"[a-z_][a-z_0-9]*", body)) & names):
            if name not in found:
                found[name] = choose(records, name, features, lanes)
                visit(found[name].text)
                found[name] = found.pop(name)  # after what it calls

    visit(text)
    return list(found.values())
