"""Every Triton and TileLang kernel of the registry, compiled or lowered for GPUs that nobody here needs to have.

All work is done by one child process without TRITON_INTERPRET (this file, run as a script): it reads a list of
(backend, op, dtype, architecture, all configs) and prints what it found. By `make test`: first configs, bf16, sm_90 and
gfx942; the rest is slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright  # noqa: F401  declares the ops
from tilewright.core import registry
from tilewright.core.device import target_device
from tilewright.core.kernel import Kernel
from tilewright.core.launch import launches_of
from tilewright.tune.classes import call_of, variants

OPS = {
    backend: [op.name for op in registry.ops() if backend in {k.backend for k in registry.kernels_of(op.name)}]
    for backend in ("triton", "tilelang")
}
LOWERED_ALIKE = {"varlen_attention", "hstu_attention", "silu_attention_backward"}
"""Their TileLang programs are lowered for a sibling too, with other constants; by themselves in the slow tests."""
COLUMNS = (1024, 4096)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Job = tuple[str, str, str, str, bool]


def _calls(op_name: str, dtype: torch.dtype, arch: str) -> list[Any]:
    """The usual call of the op, what it saves included, for each width; of a gradient that may overwrite what forward
    saved also the call that the forward's usual one makes, in place and not."""
    op = registry.op(op_name)
    calls = []
    for columns in COLUMNS:
        saving, absent = op.gradient is not None, op.probes.absent[0]
        calls.append(call_of(op, (8192, columns), dtype, target_device(arch), absent=absent, saving=saving))
    for options, absent, _ in variants(op) if _spends(op_name) else ():
        call = call_of(op, (8192, COLUMNS[0]), dtype, target_device(arch), options=options, absent=absent)
        into = op.in_place.targets(call.tensors)  # type: ignore[attr-defined]
        given = all(call.has(name) for name in into.values())
        calls += [call, *([replace(call, into=into)] if given else [])]
    return calls


def _heads(op_name: str, dtype: torch.dtype, arch: str) -> list[Any]:
    """Of an op whose heads have widths: a call of each that its probes tell apart. Of float32 not beyond 64: rows are
    held whole and in two parts, and the smallest tiles of a gradient do not fit the registers of every device."""
    op = registry.op(op_name)
    widths = sorted({sizes["D"] for sizes in op.probes.varied if "D" in sizes})
    calls = []
    for width in [w for w in widths if w <= 64 or dtype != torch.float32]:
        sizes = {n: {"D": width, "Dv": width, "Sq": 4096}.get(n, size) for n, size in op.probes.sizes.items()}
        calls.append(call_of(op, (4096, 4096, *sizes.values()), dtype, target_device(arch), absent=op.probes.absent[0]))
    return calls


def _spends(op_name: str) -> bool:
    return any(gradient.spends for gradient in registry.gradients_with(op_name) if gradient.op == op_name)


def _kernels(op_name: str, backend: str) -> list[Kernel]:
    return [k for k in registry.kernels_of(op_name) if k.backend == backend]


def work(jobs: list[Job]) -> list[dict[str, Any]]:
    """In the child: compile (Triton) or lower (TileLang) every launch of every job."""
    found = []
    for backend_name, op_name, dtype, arch, every in jobs:
        calls = _calls(op_name, DTYPES[dtype], arch)
        for kernel in _kernels(op_name, backend_name):
            some = every or backend_name == "triton" or _spends(op_name)
            for call in calls if some else calls[:1]:  # lowering takes its time
                found += _compiled(kernel, call, [backend_name, op_name, dtype, arch], every)
            if every and backend_name == "triton":
                for call in _heads(op_name, DTYPES[dtype], arch):
                    found += _compiled(kernel, call, [backend_name, op_name, dtype, arch], False)
    return found


def _compiled(kernel: Kernel, call: Any, job: list[str], every: bool) -> list[dict[str, Any]]:
    """Every launch of one call, by its first config or by every one."""
    backend, reasons = registry.backend(kernel.backend), kernel.capability.reasons(call)
    shared: dict[str, Any] = {"job": job, "kernel": str(kernel)}
    if reasons:
        return [{**shared, "refused": list(map(str, reasons))}]
    found = []
    configs = kernel.configs_for(call)
    for config in configs if every else configs[:1]:
        for launch in launches_of(kernel.load()(call, config)):
            width = call.tensors[registry.op(kernel.op).tensors[0]].columns
            entry: dict[str, Any] = {**shared, "columns": width, "config": str(config)}
            if kernel.backend == "tilelang" and not every:
                from tilewright.backends.tilelang import lower

                lowered = lower(launch, call.device)
                entry |= {"symbol": lowered.symbol, "bytes": len(lowered.source)}
            else:
                from tilewright.backends.triton import resources

                artifact = backend.compile(launch, call.device)
                entry |= {"symbol": artifact.symbol, "bytes": len(artifact.image)}
                if call.device.kind == "cuda":
                    entry["registers"], entry["spills"], entry["static_shared"] = resources(artifact)
            found.append(entry)
    return found


def _run(jobs: list[Job], cache: Path) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache / "triton"), "TILEWRIGHT_CACHE_DIR": str(cache / "own")}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(jobs), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _judge(found: list[dict[str, Any]], jobs: list[Job]) -> None:
    spilled = [e for e in found if e.get("spills")]
    assert not spilled, spilled
    compiled = {tuple(e["job"]) for e in found if "bytes" in e}
    assert compiled == {job[:4] for job in jobs}, "a kernel that no width of this architecture takes"
    for entry in found:
        assert "refused" in entry or entry["bytes"] > 500
        assert 8 <= entry.get("registers", 8) <= 255


def _need(backend: str) -> None:
    missing = registry.backend(backend).missing()
    if missing is not None:
        pytest.skip(str(missing))


def test_every_triton_kernel_compiles_for_nvidia_and_amd_without_spills(tmp_path: Path) -> None:
    _need("triton")
    jobs: list[Job] = [("triton", op, "bf16", arch, False) for op in OPS["triton"] for arch in ("sm_90", "gfx942")]
    _judge(_run(jobs, tmp_path), jobs)


def test_every_tilelang_kernel_lowers_for_hopper(tmp_path: Path) -> None:
    _need("tilelang")
    ops = [op for op in OPS["tilelang"] if op not in LOWERED_ALIKE]
    jobs: list[Job] = [("tilelang", op, "bf16", "sm_90", False) for op in ops]
    _judge(_run(jobs, tmp_path), jobs)


@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_gradients_that_overwrite_what_is_saved(backend: str, tmp_path: Path) -> None:
    """They are in float32, with the forward that saves it."""
    _need(backend)
    served = [name for name in OPS[backend] if _spends(name)]
    ops = [*served, *(op.name for name in served for op in registry.served_by(name))]
    archs = ("sm_90", "gfx942") if backend == "triton" else ("sm_90",)
    jobs: list[Job] = [(backend, op, "fp32", arch, False) for op in ops for arch in archs]
    found = _run(jobs, tmp_path)
    _judge(found, jobs)
    assert any("scale" in e["symbol"] for e in found)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_other_dtypes(backend: str, tmp_path: Path) -> None:
    _need(backend)
    archs = ("sm_90", "gfx942") if backend == "triton" else ("sm_90",)
    jobs: list[Job] = [
        (backend, op, dtype, arch, False) for op in OPS[backend] for dtype in ("fp32", "fp16") for arch in archs
    ]
    jobs += [("tilelang", op, "bf16", "sm_90", False) for op in sorted(LOWERED_ALIKE) if backend == "tilelang"]
    _judge(_run(jobs, tmp_path), jobs)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize("backend", ["triton", "tilelang"])
def test_full_matrix(backend: str, arch: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Every config of every kernel; registers and spills are written to the folder that --record names."""
    _need(backend)
    if backend == "tilelang" and arch == "gfx942":
        pytest.skip("TileLang programs are compiled for NVIDIA GPUs")
    jobs: list[Job] = [(backend, op, dtype, arch, True) for op in OPS[backend] for dtype in DTYPES]
    found = _run(jobs, tmp_path)
    record = pytestconfig.getoption("--record")
    if record:
        Path(record).mkdir(parents=True, exist_ok=True)
        (Path(record) / f"{backend}-{arch}.json").write_text(json.dumps(found, indent=1) + "\n")
    compiled = {tuple(e["job"]) for e in found if "bytes" in e}
    assert compiled == {job[:4] for job in jobs}
    # A later config may spill where an earlier one does not: it is measured, never the first guess. What TileLang's
    # CUDA source comes to is the CUDA compiler's doing and differs from one to the next: recorded, not refused.
    if backend == "tilelang":
        return
    firsts: dict[tuple[Any, ...], str] = {}
    for entry in found:
        if "bytes" in entry:
            first = firsts.setdefault((*entry["job"], entry["kernel"], entry["columns"]), entry["config"])
            assert entry["config"] != first or not entry.get("spills"), entry


if __name__ == "__main__":
    print(json.dumps(work([tuple(job) for job in json.load(sys.stdin)])))
