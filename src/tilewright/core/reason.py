"""A reason: what does not fit, in which argument, and what would do. Capabilities answer with lists of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """`argument` is the tensor, option or subject ("device", "package", "evidence"); `remedy` is "" when nothing would
    help."""

    argument: str
    problem: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.argument}: {self.problem}" + (f"; {self.remedy}" if self.remedy else "")
