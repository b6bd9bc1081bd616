"""Run a page's Python and put what each block prints below it.

    python scripts/page_output.py docs/tile-guide.md [--write]

A block with `<!-- excerpt -->` above it is not run; one with `<!-- file: name.py -->` is a file of that name where
errors and explanations name lines. What a block prints goes into the block below `<!-- output -->`, and a picture that
it writes into `docs/images`. Without `--write` the page and its pictures are only compared, and the exit code is 1
where they differ. Explanations for a CPU are those of one with AVX2, whatever runs the page.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"((?:<!-- [^\n]* -->\n)*)```python\n(.*?)```\n(?:\n<!-- output -->\n```\n(.*?)```\n)?", re.DOTALL)


@contextlib.contextmanager
def printed() -> Iterator[list[str]]:
    """What Python and C write to standard output."""
    said: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        try:
            with contextlib.redirect_stdout(open(1, "w", encoding="utf-8", closefd=False)) as out:
                yield said
                out.flush()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        said.append(file.read())


def outputs(text: str) -> str:
    """The page with the output of a run, in the current folder."""
    from tilewright.tile.runtime.target import Cpu

    explain: Any = importlib.import_module("tilewright.tile.explain")
    names: dict[str, Any] = {"__name__": "__main__"}
    usual, explain.this_cpu = explain.this_cpu, lambda: Cpu("x86_64", ("avx", "avx2", "f16c", "fma"))

    def run(found: re.Match[str]) -> str:
        marks, code, before = found.groups()
        if "excerpt" in marks:
            return found[0]
        file = re.search(r"file: (\S+)", marks)
        with printed() as said:
            exec(compile(code, file[1] if file else "page.py", "exec"), names)
        if before is None:
            if said[0]:
                raise SystemExit(f"a block prints, and the page has no place for it:\n{code}")
            return found[0]
        lines = "\n".join(line.rstrip() for line in said[0].strip().splitlines())
        return f"{marks}```python\n{code}```\n\n<!-- output -->\n```\n{lines}\n```\n"

    try:
        return BLOCK.sub(run, text)
    finally:
        explain.this_cpu = usual


def made(page: Path) -> dict[Path, str]:
    """The page and its pictures, as a run makes them."""
    here = Path.cwd()
    page = page.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            found = {page: outputs(page.read_text("utf-8"))}
        finally:
            os.chdir(here)
        pictures = sorted(Path(folder).glob("*.svg"))
        return {**found, **{page.parent / "images" / p.name: p.read_text("utf-8") for p in pictures}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    found = made(chosen.page)
    stale = [p for p, text in found.items() if not p.exists() or p.read_text("utf-8") != text]
    if chosen.write:
        for path, text in found.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print("\n".join(map(str, stale)) or "in step")
    return 1 if stale and not chosen.write else 0


if __name__ == "__main__":
    raise SystemExit(main())
