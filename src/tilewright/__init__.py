"""Tilewright: one logical operator, many kernels, always the fastest one that is proven right on this machine.

>>> import tilewright as tw
>>> y = tw.rms_norm(x, w, eps=1e-6)
>>> print(tw.explain(tw.rms_norm, x, w))
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from tilewright import backends as _backends  # noqa: F401  first: kernels name their backends
from tilewright import ops as _ops
from tilewright.core import registry as _registry
from tilewright.core.dispatch import explain as explain
from tilewright.core.dispatch import install_comparer as _install_comparer
from tilewright.core.errors import (
    CheckFailed as CheckFailed,
)
from tilewright.core.errors import (
    InvalidArgument as InvalidArgument,
)
from tilewright.core.errors import (
    NoGradient as NoGradient,
)
from tilewright.core.errors import (
    NoKernel as NoKernel,
)
from tilewright.core.errors import (
    NotWarm as NotWarm,
)
from tilewright.core.errors import (
    OutOfRange as OutOfRange,
)
from tilewright.core.errors import (
    TilewrightError as TilewrightError,
)
from tilewright.core.errors import (
    UnknownName as UnknownName,
)
from tilewright.core.errors import (
    Unsupported as Unsupported,
)
from tilewright.core.evidence import install_isolated_prover as _install_isolated_prover
from tilewright.core.evidence import install_prover as _install_prover
from tilewright.core.policy import use as use

__version__ = "0.1.0"


def _prove(*args: _Any) -> _Any:
    """The conformance engine is above the core, and loaded when a kernel is to be checked."""
    from tilewright.verify.first_use import prove

    return prove(*args)


def _prove_apart(*args: _Any) -> _Any:
    """The same in a process that may die."""
    from tilewright.tune.pool import prove_in_worker

    return prove_in_worker(*args)


def _compare(*args: _Any) -> None:
    from tilewright.verify.first_use import compare

    compare(*args)


_install_prover(_prove)
_install_isolated_prover(_prove_apart)
_install_comparer(_compare)
_registry.add_families(f"{_ops.__name__}.{_family}" for _family in _ops.FAMILIES)


def __getattr__(name: str) -> _Any:
    """Ops, and what patches models, are imported when they are first asked for: it is most of what importing costs."""
    if name in ("patch", "unpatch"):
        from tilewright import models

        found = getattr(models, name)
    elif name == "__all__":
        found = [*_HERE, *_registry.exports()]
    else:
        found = None if name.startswith("_") else _registry.export(name)
        if found is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]


if _TYPE_CHECKING:
    from tilewright.models import patch as patch
    from tilewright.models import unpatch as unpatch
    from tilewright.ops.activation import *  # noqa: F403
    from tilewright.ops.attention import *  # noqa: F403
    from tilewright.ops.embedding import *  # noqa: F403
    from tilewright.ops.hstu import *  # noqa: F403
    from tilewright.ops.linear import *  # noqa: F403
    from tilewright.ops.loss import *  # noqa: F403
    from tilewright.ops.norm import *  # noqa: F403
    from tilewright.ops.residual import *  # noqa: F403
    from tilewright.ops.rotary import *  # noqa: F403
    from tilewright.ops.sampling import *  # noqa: F403

_HERE = (
    "CheckFailed",
    "InvalidArgument",
    "NoGradient",
    "NoKernel",
    "NotWarm",
    "OutOfRange",
    "TilewrightError",
    "UnknownName",
    "Unsupported",
    "explain",
    "patch",
    "unpatch",
    "use",
)
"""What is public beside the ops."""
