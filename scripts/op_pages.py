"""One page an op in the documentation, made from the registry and the committed results when the site is built.

A hook of mkdocs (`hooks:` in mkdocs.yml). What an op computes comes from its docstring, what runs it from its kernels,
how fast from benchmarks/results/, and what is proven from the evidence that the package ships: nothing is typed here.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import torch  # noqa: E402

import tilewright  # noqa: E402, F401  declares the ops
from tilewright.core import registry  # noqa: E402
from tilewright.core.device import target_device  # noqa: E402
from tilewright.core.in_place import InPlace  # noqa: E402
from tilewright.core.kernel import Kernel  # noqa: E402
from tilewright.core.op import Op  # noqa: E402
from tilewright.tune.classes import call_of  # noqa: E402

PLACE = "Ops"
"""The entry of mkdocs.yml's `nav` that the pages go under."""
SECTIONS = ("Args", "Returns", "Raises")


@cache
def results_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_table", ROOT / "scripts" / "results_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def page(op: Op[Any]) -> str:
    """The page of one op and of its gradient, as Markdown."""
    parts = [f"# {op.name}", signature(op), *docstring(op)]
    parts += ["## Tensors and options", *surface(op)]
    if op.gradient is not None:
        parts += ["## Gradient", *gradient(op), *other_gradients(op)]
    if op.into:
        parts += ["## In place", *overwriting(op)]
    parts += ["## Kernels", *kernels(op)]
    parts += ["## Measured", *measured(op)]
    parts += ["## Try it", *commands(op)]
    return "\n\n".join(parts) + "\n"


def signature(op: Op[Any]) -> str:
    parameters = ", ".join(_parameter(p) for p in inspect.signature(op).parameters.values())
    starred = re.sub(r"(?=\b" + next(iter([*op.options, "backend"])) + r"\b)", "*, ", parameters, count=1)
    return f"```python\ntw.{op.name}({starred})\n```"


def _parameter(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


def docstring(op: Op[Any]) -> Iterator[str]:
    """The docstring as Markdown: its sections become headings, their entries a list."""
    text = inspect.cleandoc(op.__doc__ or "")
    blocks = re.split(rf"^({'|'.join(SECTIONS)}):\n", text, flags=re.MULTILINE)
    yield blocks[0].strip()
    for head, body in zip(blocks[1::2], blocks[2::2], strict=True):
        lines = inspect.cleandoc(body).splitlines()
        entries: list[str] = []
        for line in lines:
            named = re.match(r"([\w, ]+):\s", line)
            if head != "Returns" and named and not line.startswith(" "):
                entries.append(f"* `{named[1]}`: {line[named.end() :].strip()}")
            else:
                entries.append(f"    {line.strip()}" if entries and line.startswith(" ") else line.strip())
        yield f"**{head}**"
        yield "\n".join(entries)


def surface(op: Op[Any]) -> Iterator[str]:
    """Tensors with their dimensions, options with their defaults, and what holds for the result."""
    rows = [
        f"| `{name}` | `[{_dims(op.probes.dims[name])}]` | {'may be None' if name in op.optional else 'needed'} |"
        for name in op.tensors
    ]
    yield "\n".join(["| tensor | shape | |", "|---|---|---|", *rows])
    if op.options:
        chosen = [
            f"| `{name}` | {_type(op.option_types[name])} | "
            + ("must be given |" if default is inspect.Parameter.empty else f"`{default!r}` |")
            for name, default in op.options.items()
        ]
        yield "\n".join(["| option | type | default |", "|---|---|---|", *chosen])
    results = ", ".join(f"`{name}`" for name in op.out)
    yield (
        f"Results: {results}, fresh and contiguous, rounded {op.rounding}. A call that does not fit is refused with "
        "`InvalidArgument`, which names the argument, what it is and what would do, before anything runs."
    )


def _type(kind: Any) -> str:
    """As a cell of a table, in which a bar would end it."""
    return str(getattr(kind, "__name__", kind)).replace("|", "\\|")


def _dims(dims: str) -> str:
    return ", ".join("..." if word == "M" else word for word in dims.split())


def gradient(op: Op[Any]) -> Iterator[str]:
    found = op.gradient
    assert found is not None
    kept = ", ".join(f"`{name}`" for name in dict.fromkeys(found.takes.values()))
    given = ", ".join(f"`{name}`" for name in found.gives)
    none = [f"`{name}`" for name in op.tensors if name not in found.gives]
    yield (
        f"`{found.op}` is an op of its own, with kernels of its own, which autograd calls. It gives the gradients of "
        + given
        + (f"; {', '.join(none)} {'has' if len(none) == 1 else 'have'} none" if none else "")
        + f". Kept for it: {kept}. Second derivatives and forward mode are refused; "
        + f"`tw.{op.name}.reference` takes both."
    )


def other_gradients(op: Op[Any]) -> Iterator[str]:
    """Gradients that an option asks for."""
    for option, found in op.gradient_if.items():
        sparse = ", ".join(f"`{name}`" for name, made in found.gives.items() if made in found.coo)
        yield (
            f"With `{option}=True` it is `{found.op}`"
            + (f", which gives entries of a sparse gradient of {sparse}" if sparse else "")
            + (
                ". The host waits for their number, so it is refused in a CUDA graph and under `torch.compile`."
                if found.finds
                else "."
            )
        )


def overwriting(op: Op[Any]) -> Iterator[str]:
    form = op.in_place
    assert isinstance(form, InPlace)
    yield (
        f"`tw.{form.name}` takes the same arguments: {form.written()}, and the values are those of `tw.{op.name}`, bit "
        "for bit. It has no gradient. What it overwrites may share no memory with itself or with another argument."
    )


def kernels(op: Op[Any]) -> Iterator[str]:
    """Every kernel of the op and of its gradients: where it runs, how many ways, what it refuses, what is proven."""
    names = [op.name, *(one.op for one in op.gradients)]
    lines = ["| op | kernel | runs on | configs | classes proven and shipped |", "|---|---|---|---:|---|"]
    lines += [_line(registry.op(name), kernel) for name in names for kernel in registry.kernels_of(name)]
    yield "\n".join(lines)
    yield (
        "What fits a call, and why what does not fit does not, is what `tilewright explain` prints. The definition in "
        "torch is always there: where no other kernel fits, it runs, unless one was pinned with `backend=`, which then "
        "raises `NoKernel` with every reason. A kernel without shipped evidence is checked when its class is first met."
    )


def _line(op: Op[Any], kernel: Kernel) -> str:
    devices = " or ".join(map(str, kernel.capability.devices)) or "wherever torch runs"
    return (
        f"| `{op.name}` | {kernel.name.removeprefix(op.name + '/')} | {devices} | {_configs(op, kernel) or ''} | "
        f"{', '.join(_shipped(kernel))} |"
    )


def _configs(op: Op[Any], kernel: Kernel) -> int:
    """For the op's first workload, or for rows of 4096."""
    if not callable(kernel.configs):
        return len(kernel.configs)
    shape = op.workloads[0].shape if op.workloads else (4096, 4096)
    call = call_of(op, shape, torch.bfloat16, target_device("sm_90"), absent=op.probes.absent[0])
    return len(kernel.configs_for(call))


def _shipped(kernel: Kernel) -> Iterator[str]:
    classes: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src" / "tilewright" / "evidence").glob("*.json")):
        for group, entries in json.loads(path.read_text(encoding="utf-8")).items():
            if group.startswith(f"{kernel.name} {kernel.digest} "):
                classes.setdefault(path.stem, set()).update(entry.partition("|")[2] for entry in entries)
    for arch, found in classes.items():
        yield f"{len(found)} on {arch}"


def measured(op: Op[Any]) -> Iterator[str]:
    table = results_table()
    rows = [row for row in table.read(table.RESULTS) if row.facts["op"] == op.name]
    yield table.table(rows, every_backend=True)
    commits = list(_commits({row.device for row in rows}))
    if commits:
        yield f"Recorded at {'; '.join(commits)}. How to read the table: [benchmarks](../benchmarks.md)."


def _commits(devices: Iterable[str]) -> Iterator[str]:
    """What the records of those devices say of themselves."""
    names = set(devices)
    for folder in sorted({path.parent for path in results_table().RESULTS.glob("*/*.json")}):
        readme = folder / "README.md"
        if readme.is_file() and any(name.partition(" (")[0] in readme.read_text(encoding="utf-8") for name in names):
            found = re.findall(r"commit ([0-9a-f]{7,40})", readme.read_text(encoding="utf-8"))
            if found:
                yield f"commit {found[0]} ({folder.name})"


def commands(op: Op[Any]) -> Iterator[str]:
    shape = "x".join(map(str, op.workloads[0].shape if op.workloads else (4096, 4096)))
    lines = {
        f"tilewright explain {op.name} --shape {shape} --dtype bf16": "which kernel, and why",
        f"tilewright verify {op.name}": "every kernel against the definition",
        f"tilewright bench {op.name} --shape {shape} --peers": "beside rivals",
        f"tilewright tune {op.name} --shape {shape}": "times for this machine",
    }
    width = max(map(len, lines))
    yield "\n".join(["```bash", *(f"{line:{width}}  # {why}" for line, why in lines.items()), "```"])


def pages() -> dict[str, str]:
    """Path under docs/ and text of every page."""
    return {f"ops/{op.name}.md": page(op) for op in registry.ops() if not registry.served_by(op.name)}


# What mkdocs calls --------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Each family is a section beside the page on all ops."""
    families: dict[str, list[dict[str, str]]] = {}
    for op in registry.ops():
        if not registry.served_by(op.name):
            families.setdefault(op.family, []).append({op.name: f"ops/{op.name}.md"})
    for entry in config.nav:
        if PLACE in entry:
            entry[PLACE] = [entry[PLACE], *({family: found} for family, found in families.items())]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
