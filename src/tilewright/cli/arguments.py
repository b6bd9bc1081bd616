"""Words of the command line as values: shapes, dtypes, lists, options of an op, devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from tilewright.core.errors import InvalidArgument, UnknownName

Ops = Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops; all by default.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output; everything else goes to standard error.")]
Backends = Annotated[str, typer.Option("--backends", help="Backends, separated by commas; all by default.")]
DeviceName = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:1; by default the GPU if there is one.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="Rows by columns, as 8192x4096, or all sizes of the op; may be repeated."),
]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="bfloat16 (or bf16), float16, float32; repeatable.")]
Workloads = Annotated[list[str] | None, typer.Option("--workload", help="Part of a workload's name; may be repeated.")]


def words(text: str) -> list[str]:
    """ "a,b" as a list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def shape(text: str) -> tuple[int, ...]:
    """8192x4096, or 8192,4096."""
    try:
        sizes = tuple(int(part) for part in text.replace(",", "x").lower().split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InvalidArgument(
            "command line", "--shape", f"{text!r}", "needs sizes of 1 and more joined by x, as 8192x4096"
        )
    return sizes


def shapes(texts: Sequence[str] | None, ops: Sequence[str] | None) -> list[tuple[int, ...]]:
    """As each of `ops` takes them."""
    from tilewright.core import registry

    found = [shape(text) for text in texts or ()]
    for name in ops or ():
        for sizes in found:
            check_shape(registry.find(name), sizes)
    return found


def check_shape(op: Any, sizes: tuple[int, ...]) -> None:
    """An op with named sizes takes two numbers or all: what is between would be taken for leading dimensions."""
    named = list(op.probes.sizes)
    if not named or len(sizes) in (2, 2 + len(named)):
        return
    usual = next((w.shape for w in op.workloads), None)
    example = f", as {'x'.join(map(str, usual))}" if usual else ""
    raise InvalidArgument(
        "command line", "--shape", f"{len(sizes)} sizes",
        f"{op.name} takes M and C, or these and {', '.join(named)}: {2 + len(named)} sizes{example}",
    )  # fmt: skip


def dtypes(texts: Sequence[str] | None) -> list[Any]:
    return [dtype(text) for text in texts or ()]


def dtype(text: str) -> Any:
    """A torch dtype by torch's name or the short one."""
    import torch

    from tilewright.core.call import DTYPE_NAMES

    known = {short: kind for kind, short in DTYPE_NAMES.items() if kind.is_floating_point}
    known |= {str(kind).removeprefix("torch."): kind for kind in known.values()}
    found = known.get(text.removeprefix("torch."))
    if found is None:
        raise UnknownName("dtype", text, sorted(known))
    assert isinstance(found, torch.dtype)
    return found


def options(op: Any, given: Sequence[str] | None, usual: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """name=value pairs as the op's options, all of them: what is not given as in `usual`, else the op's defaults."""
    found = {**op.usual, **(usual or {})}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidArgument(op.name, "--option", f"{text!r} is no option", "name=value, as eps=1e-5")
        if name not in found:
            raise UnknownName(f"option of {op.name}", name, sorted(found))
        found[name] = _value(op, name, value)
    return found


def _value(op: Any, name: str, text: str) -> Any:
    from tilewright.core.declaration import plain_type

    kind, optional = plain_type(op.option_types[name])
    if optional and text.lower() == "none":
        return None
    truth = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        if kind is float:
            return float(text)
        if kind is int:
            return int(text)
        if kind is bool:
            return truth[text.lower()]
        if kind is str:
            return text
        if getattr(kind, "__name__", "") == "dtype":
            return dtype(text)
        return tuple(truth[part.lower()] for part in words(text))
    except (KeyError, ValueError):
        wanted = getattr(kind, "__name__", str(kind))
        raise InvalidArgument(op.name, name, repr(text), f"a {wanted} is needed") from None
