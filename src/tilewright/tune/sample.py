"""One sample of a kernel's time, in a worker: inputs made from facts and a seed, kernels bound once.

How a time is taken is `tilewright.bench.measure`'s business. Which samples are taken, and what follows from them, is
decided by the client (`rounds.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tilewright.bench import measure
from tilewright.core import registry
from tilewright.core.call import Call, TensorFacts
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.core.plan import bind
from tilewright.verify.cases import extent_of, forms_of, main_of, make_inputs, other_dtypes

SAMPLE_US = 6_000.0
"""About how long the calls of one sample of call time take together."""
LEAST_BATCH = 20
LOOKS = 3
"""A sample is the median of so many looks at a watch."""


def inputs_of(call: Call, seed: int) -> list[Tensor | None]:
    """Tensors with exactly the facts of `call`, in the op's order."""
    op = registry.op(call.op)
    device = torch.device("cpu") if not call.device.is_gpu else torch.device("cuda", call.device.index)
    made = make_inputs(
        op, extent_of(call), main_of(call).dtype,
        options=call.options, absent=tuple(n for n in op.tensors if call.tensors[n] is None),
        seed=seed, device=device, dtypes=other_dtypes(call), forms=forms_of(call),
    )  # fmt: skip
    return [_laid_out(made[n], call.tensors[n]) for n in op.tensors]


def _laid_out(tensor: Tensor | None, facts: TensorFacts | None) -> Tensor | None:
    """The tensor's values with the strides and the alignment that `facts` state."""
    if tensor is None or facts is None:
        return tensor
    if tensor.dim() == len(facts.shape) == 1 and tensor.numel() not in (0, facts.numel):  # as many as there were
        tensor = tensor.repeat(-(-facts.numel // tensor.numel()))[: facts.numel]
    if facts.contiguous and facts.align >= 16:
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
        inputs = inputs_of(call, seed)
        first = next(t for t in inputs if t is not None)
        self.device = first.device
        self.stream = torch.cuda.Stream(self.device) if call.device.is_gpu else None
        self.sets, self.flush = [inputs], False
        self.size = sum(t.numel() * t.element_size() for t in inputs if t is not None)
        if call.device.is_gpu:
            count, self.flush = measure.rotation(self.size, measure.cache_bytes(self.device))
            self.sets += [_copy(inputs, call) for _ in range(count - 1)]
        self._watches: dict[tuple[str, str, Config], tuple[measure.Watch, measure.Watch]] = {}

    def sample(self, kernel: Kernel, config: Config) -> tuple[float, float]:
        """(call, kernel) microseconds. Both are the same on a CPU, where the call is the work."""
        try:
            return self._timed(kernel, config)
        except torch.OutOfMemoryError:
            self._watches.clear()  # each holds outputs of its own
            torch.cuda.empty_cache()
            return self._timed(kernel, config)

    def _timed(self, kernel: Kernel, config: Config) -> tuple[float, float]:
        with torch.no_grad():
            calls, kernels = self._watch(kernel, config)
            call_us = _median(calls)
            return call_us, call_us if kernels is calls else _median(kernels)

    def _watch(self, kernel: Kernel, config: Config) -> tuple[measure.Watch, measure.Watch]:
        key = (kernel.name, kernel.digest, config)  # a plug-in's kernel may bear the name of another
        found = self._watches.get(key)
        if found is None:
            run = bind(kernel, config, self.call)
            runs: Sequence[Callable[[], object]] = [partial(run, *tensors) for tensors in self.sets]
            for _ in range(3):
                runs[0]()
            calls = measure.call_watch(runs[0], self.device, LEAST_BATCH)
            kernels = calls
            if self.stream is not None:
                calls()
                batch = min(max(int(SAMPLE_US / calls()), LEAST_BATCH), measure.BATCH)
                calls = measure.call_watch(runs[0], self.device, batch)
                kernels = measure.kernel_watch(
                    runs, self.device, self.stream, size=self.size, cold=True, flush=self.flush
                )
            calls()
            found = self._watches[key] = calls, kernels
        return found


def _median(watch: measure.Watch) -> float:
    return statistics.median(watch() for _ in range(LOOKS))


def _copy(tensors: list[Tensor | None], call: Call) -> list[Tensor | None]:
    facts = (call.tensors[n] for n in registry.op(call.op).tensors)
    return [None if t is None else _laid_out(t.clone(), f) for t, f in zip(tensors, facts, strict=True)]
