"""A red case as a script of at most 20 lines that reproduces it, beside the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from tilewright.core import registry
from tilewright.core.cache import cache_directory
from tilewright.core.device import device_of
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.verify.cases import Case

_TEXT = '''\
"""{name} {config}: {problem}
Kernel digest {digest}."""
{environment}import torch  # noqa: F401  the case below names its dtypes
import tilewright  # noqa: F401  declares the ops
from tilewright.core import registry
from tilewright.core.launch import Config
from tilewright.verify.cases import Case, build
from tilewright.verify.check import check, truth_of

case = {case!r}
op = registry.op(case.op)
kernel = next(k for k in registry.kernels_of(case.op) if k.name == {name!r})
inputs, options = build(case, op, {device!r}), {{**op.usual, **case.options}}
for saving in {{op.gradient is not None and kernel.capability.gradient, False}}:
    truth = truth_of(op, inputs, options, saving)
    how = dict(saving=saving, in_place=not saving, emulated={emulated})
    print(check(kernel, {config!r}, op, inputs, options, truth, **how).problems)
'''


def write_script(kernel: Kernel, config: Config, case: Case, problems: Sequence[str], device: torch.device) -> str:
    """Write it and return its path; "" where the disk takes nothing."""
    backend = registry.backend(kernel.backend)
    emulated = backend.emulates(device_of(device.type, device.index))
    environment = f"import os; os.environ.update({dict(backend.emulation)})\n" if emulated else ""
    text = _TEXT.format(
        name=kernel.name, config=config, digest=kernel.digest, case=case, device=str(device),
        environment=environment, emulated=emulated,
        problem=problems[0].replace('"""', "'''") if problems else "",
    )  # fmt: skip
    name = f"{kernel.op}-{kernel.backend}-{hashlib.sha256(text.encode()).hexdigest()[:10]}.py"
    path = cache_directory() / "red" / name
    try:
        cache_directory().mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        path.with_suffix(".new").write_text(text, encoding="utf-8")
        path.with_suffix(".new").replace(path)
        _drop_others(kernel, path.parent)
    except OSError:
        return ""
    return str(path)


def _drop_others(kernel: Kernel, folder: Path) -> None:
    """Scripts of this kernel's other sources reproduce nothing any more."""
    for path in folder.glob(f"{kernel.op}-{kernel.backend}-*.py"):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # another process was here first
        if text.startswith(f'"""{kernel.name} ') and f"Kernel digest {kernel.digest}." not in text:
            path.unlink(missing_ok=True)
