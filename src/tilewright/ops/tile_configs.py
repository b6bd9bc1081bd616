"""How kernels in the library's own tile language are declared: for CPUs, and for NVIDIA GPUs with the schedules that
are worth timing there. What fits a GPU is asked of the compiler, which is imported then."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.core.call import Call
from tilewright.core.capability import Capability, Limit, cpu, cuda
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config, launches_of
from tilewright.core.reason import Reason

WIDEST = 131072
"""Columns of a row whose kernel asks for their number: what the backend makes scratch for on a CPU."""
PLAIN = Config()
"""On a CPU there is nothing to choose, and on a GPU it is the compiler's own guess."""


def tile_kernel(
    op: str, source: str, *limits: Limit, in_place: bool = False, label: str = "", origin: str = "tilewright"
) -> Kernel:
    """The declaration of a tile kernel. Its function passes the config on as an option of its launches. `label` and
    `origin` as a `Kernel` has them."""
    function = Kernel(op, "tile", source).load
    latest: list[tuple[Call, tuple[tuple[Config, ...], str]]] = []  # selection asks for limits, then for configs

    def found(call: Call) -> tuple[tuple[Config, ...], str]:
        from tilewright.backends.tile import fitting

        for known, answer in latest:
            if known is call:
                return answer
        schedules, why = fitting(launches_of(function()(call, PLAIN)), call)
        answer = tuple(Config(threads=s.threads, instances=s.instances, vector=s.vector) for s in schedules), why
        latest[:] = [(call, answer)]
        return answer

    def configs(call: Call) -> tuple[Config, ...]:
        return found(call)[0] if call.device.is_gpu else (PLAIN,)

    def fits(call: Call) -> Iterable[Reason]:
        if call.device.is_gpu and (why := found(call)[1]):
            yield Reason("shape", why, "fewer columns would do")

    capability = Capability((cpu(), cuda(80)), limits=(*limits, fits), in_place=in_place)
    return Kernel(op, "tile", source, capability, configs, label=label, origin=origin)
