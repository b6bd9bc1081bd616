"""One sample of a kernel's time, in a worker: inputs made from facts and a seed, kernels bound once, short measurements.

How a time is taken is `tilewright.bench.measure`'s business on a GPU; on a CPU it is a median over short batches. Which
samples are taken, and what follows from them, is decided by the client (`rounds.py`).
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from tilewright.core import registry
from tilewright.core.call import Call, TensorFacts
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.core.plan import Run, bind
from tilewright.verify.cases import make_inputs

CPU_SECONDS = 0.02
"""A sample's length on a CPU: long enough to average over the clock, short enough for many rounds."""
CPU_BATCHES = 7


def inputs_of(call: Call, seed: int) -> list[Tensor | None]:
    """Tensors with exactly the facts of `call`, in the op's order."""
    op = registry.op(call.op)
    main = next(
        facts for n in op.tensors if op.probes.dims[n] == "M C" and (facts := call.tensors[n]) is not None
    )
    either = next(
        (f.dtype for n in op.probes.either if (f := call.tensors[n]) is not None and f.dtype != main.dtype), None
    )
    device = torch.device("cpu") if not call.device.is_gpu else torch.device("cuda", call.device.index)
    made = make_inputs(
        op, main.shape[:-1], main.columns, main.dtype,
        options=call.options, absent=tuple(n for n in op.tensors if call.tensors[n] is None),
        seed=seed, device=device, either=either,
    )  # fmt: skip
    return [_laid_out(made[n], call.tensors[n]) for n in op.tensors]


def _laid_out(tensor: Tensor | None, facts: TensorFacts | None) -> Tensor | None:
    """The tensor's values with the strides and the alignment that `facts` state."""
    if tensor is None or facts is None or (facts.contiguous and facts.align >= 16):
        return tensor
    length = 1 + sum((n - 1) * s for n, s in zip(facts.shape, facts.stride, strict=True)) if facts.numel else 0
    offset = facts.align // facts.dtype.itemsize if facts.align < 16 else 0
    room = tensor.new_zeros(length + offset)
    bent = room.as_strided(facts.shape, facts.stride, offset)
    if 0 in facts.stride:  # several elements are one: any of the values will do
        room.copy_(tensor.flatten()[:1].expand(room.shape)) if tensor.numel() else None
    else:
        bent.copy_(tensor)
    return bent


class Timing:
    """Samples of kernels on one call's inputs. A pair is bound and warmed when it is first asked for."""

    def __init__(self, call: Call, seed: int) -> None:
        self.call = call
        self.op = registry.op(call.op)
        self.gpu = call.device.is_gpu
        self.sets = [inputs_of(call, seed)]
        if self.gpu:
            from tilewright.bench import measure

            self.sets = measure.rotate(self.sets[0], call.device.l2_bytes)
        self._runs: dict[tuple[str, Config], Run] = {}

    def sample(self, kernel: Kernel, config: Config) -> tuple[float, float]:
        """(call, kernel) microseconds: medians of one short measurement each."""
        key = (kernel.name, config)
        with torch.no_grad():
            run = self._runs.get(key)
            if run is None:
                run = bind(kernel, config, self.call)
                for _ in range(3):
                    run(*self.sets[0])
                self._runs[key] = run
            return self._on_gpu(run) if self.gpu else self._on_cpu(run)

    def _on_cpu(self, run: Run) -> tuple[float, float]:
        """The whole call: on a CPU nothing runs beside it."""
        tensors = self.sets[0]
        clock = time.perf_counter
        start = clock()
        run(*tensors)
        once = max(clock() - start, 1e-7)
        calls = max(1, math.ceil(CPU_SECONDS / CPU_BATCHES / once))
        found: list[float] = []
        for _ in range(CPU_BATCHES):
            start = clock()
            for _ in range(calls):
                run(*tensors)
            found.append((clock() - start) / calls)
            if sum(found) * calls > 5 * CPU_SECONDS:  # a slow kernel: its batch is a single call
                break
        us = statistics.median(found) * 1e6
        return us, us

    def _on_gpu(self, run: Run) -> tuple[float, float]:
        from tilewright.bench import measure

        def call(*tensors: Any) -> Any:
            return run(*tensors)

        return measure.call_time(call, self.sets[0]), measure.kernel_time(call, self.sets)
