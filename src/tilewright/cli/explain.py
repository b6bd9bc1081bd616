"""`tilewright explain`: how a call would be served, here or on a machine that is not here."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from tilewright.cli import arguments
from tilewright.cli.arguments import Json
from tilewright.cli.output import json_only, stdout


def command(
    op: Annotated[str, typer.Argument(metavar="OP", help="The op's name; gelu_ for gelu in place.")],
    shape: Annotated[
        str, typer.Option("--shape", help="Rows by columns, or all sizes of the op; by default its first workload.")
    ] = "",
    dtype: Annotated[
        str, typer.Option("--dtype", help="bfloat16, float16, float32; by default the workload's, else bfloat16.")
    ] = "",
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, sm_90, gfx942; by default what is here.")] = "",
    grad: Annotated[bool, typer.Option("--grad", help="The inputs ask for gradients.")] = False,
    option: Annotated[list[str] | None, typer.Option("--option", help="An option of the op, as eps=1e-5.")] = None,
    without: Annotated[str, typer.Option("--without", help="Optional tensors to leave out, by commas.")] = "",
    backend: Annotated[str, typer.Option("--backend", help="As if the call were pinned to it.")] = "",
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also what a compiler makes of the kernels that fit; tile's says it.")
    ] = False,
    json: Json = False,
) -> None:
    """Show every kernel for a call: chosen or not, why, its config, evidence and measured time. Runs nothing."""
    with json_only(json) as emit:
        import tilewright  # noqa: F401  declares the ops
        from tilewright.core import policy, registry, selection

        known = registry.find(op)
        if backend:
            registry.check_pin(backend, known)
        absent = arguments.words(without) if without else list(known.probes.absent[0])
        usual = next(iter(known.workloads), None) if not shape else None
        size = usual.shape if usual else arguments.shape(shape or "8192x4096")
        arguments.check_shape(known, size)
        kind = usual.dtype if usual and not dtype else arguments.dtype(dtype or "bfloat16")
        chosen = arguments.options(known, option, usual.options if usual else {})
        call = make_call(known, size, kind, machine(device), options=chosen, absent=absent, saving=grad)
        found = selection.weigh(call, policy.current(), backend=backend or None)
        inside = _compiled(found) if compiled else {}
        if compiled and not inside:
            found.notes.append(_nothing_compiled(found))
        if json:
            emit(_facts(found) | ({"compiled": inside} if compiled else {}))
            return
    stdout().print("\n\n".join([str(found), *inside.values()]), markup=False, highlight=False, soft_wrap=True)


def machine(name: str) -> Any:
    """The device class of a name: what is here, or an architecture to compile for."""
    from tilewright.core.device import default_device, device_of, target_device
    from tilewright.core.errors import UnknownName

    if not name:
        here = default_device()
        return device_of(here.type, here.index)
    if re.fullmatch(r"sm_\d+|gfx[0-9a-f]+", name):
        return target_device(name)
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UnknownName("device", name, ["cpu", "cuda", "cuda:N", "sm_90", "sm_100", "gfx942"])
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        raise UnknownName("device", name, ["cpu", "an architecture such as sm_90"])
    return device_of(kind, int(index) if index else None)


def make_call(
    op: Any, shape: tuple[int, ...], dtype: Any, device: Any, *, options: Any, absent: Any, saving: bool
) -> Any:
    """The facts of a call with dense inputs, from the dimensions that the op declares."""
    from tilewright.core.errors import NoGradient, UnknownName
    from tilewright.tune.classes import call_of

    if saving and op.gradient is None:
        raise NoGradient(f"{op.name} has no gradient")
    for name in absent:
        if name not in op.optional:
            raise UnknownName(f"optional tensor of {op.name}", name, sorted(op.optional))
    return call_of(op, shape, dtype, device, options=options, absent=absent, saving=saving)


def _compiled(found: Any) -> dict[str, str]:
    """What compilers say of the kernels that fit, by kernel."""
    from tilewright.core import registry

    fitting = [c for c in found.candidates if c.fits and c.config is not None]
    said = {c.kernel.name: registry.backend(c.backend).explain(c.kernel, c.config, found.call) for c in fitting}
    return {name: text for name, text in said.items() if text}


def _nothing_compiled(found: Any) -> str:
    """Why --compiled has nothing to add."""
    there = any(c.backend == "tile" for c in found.candidates)
    why = "does not take this call" if there else f"has no kernel of {found.call.op}"
    return f"--compiled: tile's compiler alone says what it makes of a kernel, and tile {why}"


def _facts(found: Any) -> dict[str, Any]:
    from tilewright.core import evidence

    candidates = [
        {
            "backend": c.kernel.backend,
            "kernel": c.kernel.name,
            "config": str(c.config or ""),
            "fits": c.fits,
            "reasons": [str(reason) for reason in c.reasons],
            "wrong": evidence.against(c.kernel, found.call.device.arch) if c.fits else "",
            "proven": c.kernel.backend == "reference" or bool(c.verdict and c.verdict.passed),
            "call_us": c.time.call_us if c.time else None,
            "kernel_us": c.time.kernel_us if c.time else None,
        }
        for c in found.candidates
    ]
    return {
        "op": found.call.form,
        "device": str(found.call.device),
        "call_class": found.call_class,
        "chosen": found.chosen.kernel.name if found.chosen else None,
        "why": found.why,
        "candidates": candidates,
        "notes": found.notes,
    }
