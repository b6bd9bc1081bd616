"""How kernels in the library's own tile language are declared: for CPUs, and for NVIDIA GPUs with the schedules that
are worth timing there. What fits a GPU is asked of the compiler, which is imported then."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call
from tilewright.core.capability import Capability, Limit, cpu, cuda
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config, Launch, launches_of
from tilewright.core.reason import Reason

ASKED = 4096
"""Columns up to which every schedule of every kernel fits every GPU, so that nothing is asked."""
PLAIN = Config()


def tile_kernel(op: str, source: str, *limits: Limit, in_place: bool = False) -> Kernel:
    """The declaration of a tile kernel. Its function passes the config on as an option of its launches."""
    named = Kernel(op, "tile", source)

    def launches(call: Call, config: Config) -> tuple[Launch, ...]:
        return launches_of(named.load()(call, config))

    def refusals(call: Call, config: Config) -> list[str]:
        from tilewright.backends.tile import refusal

        if max((f.columns for f in call.tensors.values() if f is not None), default=0) <= ASKED:
            return []
        return list(filter(None, (refusal(launch, call) for launch in launches(call, config))))

    def candidates(call: Call) -> tuple[Config, ...]:
        from tilewright.backends.tile import schedules

        found = schedules(launches(call, PLAIN)[0], call)
        return tuple(Config(threads=s.threads, instances=s.instances, vector=s.vector) for s in found)

    def configs(call: Call) -> tuple[Config, ...]:
        if not call.device.is_gpu:
            return (PLAIN,)
        return tuple(config for config in candidates(call) if not refusals(call, config))

    def fits(call: Call) -> Iterable[Reason]:
        if not call.device.is_gpu:
            return
        if not configs(call):
            yield Reason("shape", refusals(call, candidates(call)[0])[0], "fewer columns would do")

    return Kernel(op, "tile", source, Capability((cpu(), cuda(80)), limits=(*limits, fits), in_place=in_place), configs)
