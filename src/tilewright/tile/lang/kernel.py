"""Kernels and fragments: how a Python function becomes a program.

`@kernel` holds a function over `t` and its arguments; `bind` gives it fragments, whose own tensors join the arguments;
`trace` runs it once for given argument types. How programs are compiled and called is in `runtime`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn, overload

from tilewright.tile import dtypes
from tilewright.tile.dtypes import DType
from tilewright.tile.errors import TileError
from tilewright.tile.ir.tile_ir import Most, Program, ViewType
from tilewright.tile.ir.tile_verify import verify
from tilewright.tile.lang.functions import Functions
from tilewright.tile.lang.tiles import Tile, View
from tilewright.tile.lang.trace import Recorder

Argument = ViewType | DType | int | float | bool | str | None
"""What a kernel is told of an argument: a tensor's type, a scalar's, or a constant of the compilation."""
SCALARS = (dtypes.float32, dtypes.int64)


class Fragment:
    """A piece of a kernel with arguments of its own. Calling it binds those, last parameters first; numbers and
    strings become constants, everything else an argument of the kernel."""

    def __init__(self, function: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        self.function, self.bound = function, dict(bound or {})
        self.parameters = list(inspect.signature(function).parameters)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **named: Any) -> Fragment:
        free = [p for p in self.parameters if p not in self.bound and p not in named]
        unknown = [n for n in named if n not in self.parameters]
        if unknown or len(args) > len(free):
            raise TypeError(f"{self.function.__name__} has no parameter {unknown or args[len(free) :]}")
        last = dict(zip(free[len(free) - len(args) :], args, strict=True))
        return Fragment(self.function, {**self.bound, **last, **named})

    def arguments(self) -> dict[str, Any]:
        """What joins the kernel's arguments."""
        return {n: v for n, v in self.bound.items() if not isinstance(v, int | float | str | Most | None)}

    def inlined(self, handles: Mapping[str, Any]) -> Callable[..., Any]:
        """The function for a trace, with its bound arguments as handles."""
        values = {**self.bound, **handles}

        def call(*args: Any) -> Any:
            twice = [p for p in self.parameters[: len(args)] if p in values]
            if twice:
                raise TypeError(f"{self.function.__name__} is called with {twice[0]}, and it was bound, too")
            missing = [p for p in self.parameters[len(args) :] if p not in values]
            if missing:
                raise TypeError(f"{self.function.__name__} needs {', '.join(missing)}: bind it")
            return self.function(*args, **{n: values[n] for n in self.parameters[len(args) :]})

        return call


fragment = Fragment
"""Makes a function of (t, ..., own arguments) a fragment."""


@dataclass(frozen=True)
class Kernel:
    """A function over tiles. `static` lists the sizes that it may ask for as Python ints; `inplace` the pairs of views
    that may be the same memory, element for element."""

    function: Callable[..., Any]
    static: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inplace: frozenset[frozenset[str]] = frozenset()
    fragments: Mapping[str, Fragment | None] = field(default_factory=dict)

    on: ClassVar[Callable[..., None] | None] = None
    """What runs a kernel on a grid with arguments; set by the runtime, which lies above."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """The kernel on a grid of instances, to be called with its arguments."""
        if Kernel.on is None:
            raise TypeError("no runtime is loaded: import tilewright.tile")
        return functools.partial(Kernel.on, self, grid)

    def __call__(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: a kernel is no function of tensors."""
        raise TypeError(f"{self.name} runs on a grid of instances: {self.name}[(n,)](...)")

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Those that are arguments: neither `t` nor fragments."""
        return {n: p for n, p in self._after_t().items() if n not in self.pieces()}

    def bind(self, **fragments: Fragment | None) -> Kernel:
        """The kernel with these fragments in place of its defaults."""
        unknown = [n for n in fragments if n not in inspect.signature(self.function).parameters]
        if unknown:
            raise TypeError(f"{self.name} has no parameter {unknown[0]}")
        return replace(self, fragments={**self.fragments, **fragments})

    def aliased(self, *pairs: Iterable[str]) -> Kernel:
        """The kernel for calls where these pairs of views are the same memory."""
        return replace(self, inplace=self.inplace | set(map(frozenset, pairs)))

    def bound(self) -> dict[str, Any]:
        """The arguments that fragments bring, by their name in the kernel."""
        return {
            f"{place}_{name}": value
            for place, piece in self.pieces().items()
            if piece is not None
            for name, value in piece.arguments().items()
        }

    def _after_t(self) -> dict[str, inspect.Parameter]:
        return dict(list(inspect.signature(self.function).parameters.items())[1:])

    def pieces(self) -> dict[str, Fragment | None]:
        """What each fragment's place holds."""
        return {
            n: self.fragments.get(n, p.default)
            for n, p in self._after_t().items()
            if n in self.fragments or isinstance(p.default, Fragment)
        }

    def trace(self, arguments: Mapping[str, Argument]) -> Program:
        """The program for arguments of these types, verified.

        Args:
            arguments: by name, those that fragments bring included (see `bound`). Views and scalar dtypes stand for
                run-time arguments; anything else is a constant.

        Raises:
            TraceError: the function does what tiles cannot; the message names its line.
        """
        views = {n: self._sizes(n, v) for n, v in arguments.items() if isinstance(v, ViewType)}
        scalars = {n: v for n, v in arguments.items() if isinstance(v, DType)}
        wrong = [f"{n} is {v}" for n, v in scalars.items() if v not in SCALARS]
        if wrong:
            raise TileError(f"{self.name}: scalars are float32 or int64; {wrong[0]}")
        recorder = Recorder(self.name, views, scalars)
        handles: dict[str, Any] = {**arguments}
        handles |= {n: View(recorder, n, v) for n, v in views.items()}
        handles |= {n: Tile(recorder, recorder.add("argument", dtype=v, name=n)) for n, v in scalars.items()}
        own = {n: handles.pop(n) for n in self.parameters if n in handles}
        missing = [n for n, p in self.parameters.items() if n not in own and p.default is p.empty]
        if missing:
            raise TypeError(f"{self.name} needs {', '.join(missing)}")
        for place, piece in self.pieces().items():
            mine = {} if piece is None else {n: handles.pop(f"{place}_{n}") for n in piece.arguments()}
            own[place] = piece if piece is None else piece.inlined(mine)
        if handles:
            raise TypeError(f"{self.name} has no parameter {', '.join(handles)}")
        self.function(Functions(recorder), **own)
        program = recorder.finish(self.inplace)
        verify(program)
        return program

    def _sizes(self, name: str, view: ViewType) -> ViewType:
        """The view without the sizes that the kernel may not ask for."""
        asked = self.static.get(name, ())
        return replace(view, sizes=tuple(s if i in asked else None for i, s in enumerate(view.sizes)))


Static = Mapping[str, tuple[int, ...]] | None
Pairs = Iterable[Iterable[str]]


@overload
def kernel(function: Callable[..., Any], /, *, static: Static = None, inplace: Pairs = ()) -> Kernel: ...
@overload
def kernel(*, static: Static = None, inplace: Pairs = ()) -> Callable[[Callable[..., Any]], Kernel]: ...
def kernel(function: Callable[..., Any] | None = None, /, *, static: Static = None, inplace: Pairs = ()) -> Any:
    """Make a function of (t, arguments, fragments) a kernel. See `Kernel`."""

    def make(found: Callable[..., Any]) -> Kernel:
        return Kernel(found, static or {}, frozenset(frozenset(p) for p in inplace))

    return make if function is None else make(function)
