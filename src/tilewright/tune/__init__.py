"""The tuner: times proven kernels in processes that may die, so that selection can choose by what was measured here.

It reads ops and kernels as data and knows none by name. Times are kept in `core/times.py`, evidence in
`core/evidence.py`; choosing is selection's.
"""

from tilewright.tune.classes import calls_of
from tilewright.tune.engine import tune
from tilewright.tune.report import Report

__all__ = ["Report", "calls_of", "tune"]
