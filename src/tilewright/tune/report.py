"""What a tuning run did, as data: times, choices, failures, what was skipped. Printing it is the command line's job."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tilewright.core.times import Metric
from tilewright.tune.others import LIMIT

Stage = Literal["compile", "prove", "time"]


@dataclass(frozen=True)
class PairTime:
    """Measured microseconds of one (kernel, config)."""

    backend: str
    kernel: str
    config: str
    call_us: float
    kernel_us: float


@dataclass(frozen=True)
class PairFailure:
    """A candidate that is out, and why. `kind` is "wrong", "unproven", "hung", "died", "error" or "memory"."""

    backend: str
    kernel: str
    config: str
    stage: Stage
    kind: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """What selection takes by one metric now, and the share of resamplings that agree (1.0 where none was needed)."""

    backend: str
    kernel: str
    config: str
    sure: float


@dataclass
class ClassReport:
    """One call class. `variant` tells it from others of the op and shape. `timed` counts the pairs that this run
    measured, `kept` those whose earlier times still hold and were not measured again."""

    op: str
    call_class: str
    workload: str
    shape: list[int]
    dtype: str
    saving: bool
    variant: str = ""
    times: list[PairTime] = field(default_factory=list)
    failures: list[PairFailure] = field(default_factory=list)
    chosen: dict[Metric, Choice] = field(default_factory=dict)
    timed: int = 0
    kept: int = 0
    rounds: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    """On a CPU, the share of it that other processes took meanwhile, where that is known."""


@dataclass
class Report:
    """A run over many classes, in the order in which they were tuned."""

    device: str
    driver: str
    classes: list[ClassReport] = field(default_factory=list)

    @property
    def failures(self) -> list[PairFailure]:
        return [failure for found in self.classes for failure in found.failures]

    @property
    def rough(self) -> str:
        """What to say where other processes took CPUs meanwhile, or ""."""
        disturbed = [c.busy for c in self.classes if c.busy > LIMIT]
        if not disturbed:
            return ""
        return (
            f"rough: while {len(disturbed)} of {len(self.classes)} were measured, other processes took up to "
            f"{max(disturbed):.0%} of the CPUs; the next `tilewright tune` measures them again"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
