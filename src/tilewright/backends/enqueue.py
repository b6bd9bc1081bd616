"""Launches as data: arguments matched with a cubin's parameters, and the function that enqueues them, as fast as Python
can. Loading kernels and the driver itself are in `cubin.py`.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from tilewright.core.backend import Artifact, Buffers
from tilewright.core.call import TensorFacts
from tilewright.core.launch import Launch, Scratch, TensorMap


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared", c_uint32),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint32),
    ]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: an id, padding to 8, a union of 64 bytes."""

    _fields_ = [("id", c_uint32), ("padding", c_uint32), ("words", c_uint32 * 16)]


CLUSTER_DIMENSION = 4
PROGRAMMATIC_STREAM_SERIALIZATION = 6
STREAM_WORD = LaunchConfig.stream.offset // 8
CONFIG_WORDS = ctypes.sizeof(LaunchConfig) // 8


MAP_WORDS = 16
"""Of CUtensorMap in cuda.h, 8 bytes each."""
KINDS: dict[str, Any] = {
    "pointer": c_uint64, "map": c_uint64 * MAP_WORDS, "i32": c_int32, "i64": c_int64, "f32": c_float,
}  # fmt: skip


@dataclass(frozen=True)
class Located:
    """The descriptor of a buffer whose address is not known yet."""

    map: TensorMap
    position: int


@dataclass(frozen=True)
class Step:
    """One launch with everything worked out. A slot is the position of a buffer, a constant that is ready to pass, or
    the descriptor of a buffer."""

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    cluster: tuple[int, int, int]
    pdl: bool
    slots: tuple[int | ctypes._SimpleCData[Any] | Located, ...]


def bind(artifact: Artifact, launch: Launch, positions: Mapping[str, int]) -> Step:
    """Match the parameters of `artifact` with the arguments of `launch`; `positions` are those of the buffers."""
    slots: list[int | ctypes._SimpleCData[Any] | Located] = []
    args = {**launch.args, "": None, "*": launch.workspace}
    for parameter in artifact.parameters:
        value = args[parameter.name]
        given = isinstance(value, (TensorFacts, Scratch))
        if (given or value is None) != (parameter.kind == "pointer") or (
            isinstance(value, TensorMap) != (parameter.kind == "map")
        ):
            raise TypeError(f"{artifact.symbol}: {parameter.name} is a {parameter.kind}, got {value!r}")
        elif isinstance(value, (TensorFacts, Scratch)):
            slots.append(positions[value.name])
        elif isinstance(value, TensorMap):
            slots.append(Located(value, positions[value.facts.name]))
        elif value is None:
            slots.append(c_uint64(0))
        else:
            slots.append(_constant(artifact.symbol, parameter.name, parameter.kind, value))
    if artifact.workspace * math.prod(launch.grid) > (launch.workspace.nbytes if launch.workspace else 0):
        raise ValueError(f"{artifact.symbol}: a block uses {artifact.workspace} bytes of {launch.workspace}")
    for axis, size, limit in zip("xyz", launch.grid, (2**31 - 1, 65535, 65535), strict=True):
        if not 0 <= size <= limit:
            raise ValueError(f"{artifact.symbol}: grid {axis} = {size} is outside 0 to {limit}")
    shape = (artifact.block, artifact.shared, artifact.cluster)
    return Step(artifact.symbol, launch.grid, *shape, launch.pdl, tuple(slots))


def _constant(symbol: str, name: str, kind: str, value: int | float | bool) -> ctypes._SimpleCData[Any]:
    if kind[0] == "i":
        bits = int(kind[1:]) - 1
        if not isinstance(value, int) or not -(2**bits) <= value < 2**bits:
            raise TypeError(f"{symbol}: {name} = {value!r} is no {kind}")
    return KINDS[kind](value)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Maps:
    """Who makes descriptors: `made` for no address yet, `place(map, address)` for one, `recover(code, map, address)`
    where that has failed with a code."""

    made: Callable[[TensorMap], ctypes.Array[Any]]
    place: Any
    recover: Callable[[int, Any, Any], None]


def enqueuer(
    steps: Sequence[Step],
    functions: Sequence[c_void_p],
    launch: Any,
    raw_stream: Callable[[int], int],
    recover: Callable[[int, int, Any, Any], None],
    index: int,
    maps: Maps | None = None,
) -> Callable[[Buffers], None]:
    """A function that launches `steps` on the current stream of device `index`, the buffers' addresses filled in.

    It is the whole cost of a call, so it is generated with every loop unrolled (a loop over pointers and launches costs
    0.1 us an element). Every argument of the ctypes call is a ready ctypes object and `argtypes` stays unset: no
    conversion runs, and cuLaunchKernelEx with its 4 arguments costs 0.25 us in ctypes where cuLaunchKernel with 11
    costs 0.45 to 1.1.

    A frame holds one call's parameters: address words shared by all steps, and a config and a parameter array for each.
    Threads never share one: `list.pop` and `list.append` are atomic, and an empty list makes a new frame. The driver
    copies the parameters before a launch returns. Descriptors lie in the frame too, and are told each call's addresses;
    with them the first frame is made at once: what the driver refuses of them is known before the first call.
    """
    located = list(dict.fromkeys(slot for step in steps for slot in step.slots if isinstance(slot, Located)))
    if located and maps is None:
        raise TypeError("descriptors need somebody who makes them")
    used = sorted({slot for step in steps for slot in step.slots if isinstance(slot, int)})
    word = {position: i for i, position in enumerate(used)}
    attributes = [_attributes(step) for step in steps]
    free: list[tuple[Any, ...]] = []

    def new() -> tuple[Any, ...]:  # frames point into `attributes` and the constants of `steps`: this keeps both
        words = (c_uint64 * max(len(used), 1))()
        base = ctypes.addressof(words)
        frame: list[Any] = [words]
        own_maps = {slot: maps.made(slot.map) for slot in located} if maps else {}
        for step, own in zip(steps, attributes, strict=True):
            config = LaunchConfig(step.grid, step.block, step.shared)
            if own is not None:
                config.attributes, config.count = ctypes.addressof(own), len(own)
            frame.append((c_uint64 * CONFIG_WORDS).from_buffer(config))
            frame.append(
                (c_void_p * max(len(step.slots), 1))(
                    *(
                        base + 8 * word[s]
                        if isinstance(s, int)
                        else ctypes.addressof(own_maps[s] if isinstance(s, Located) else s)
                        for s in step.slots
                    )
                )
            )
        return (*frame, *own_maps.values())

    numbers = range(len(steps))
    names = "".join(f", config{i}, params{i}" for i in numbers)
    names += "".join(f", map{i}" for i in range(len(located)))
    lines = [
        "def enqueue(buffers):",
        "    try:",
        "        frame = pop()",
        "    except IndexError:",
        "        frame = new()",
        f"    words{names}, = frame",
        "    " + "".join(f"config{i}[{STREAM_WORD}] = " for i in numbers) + f"raw_stream({index})",
    ]
    if used:
        lines.append("    pack(words, 0, " + ", ".join(f"buffers[{p}].data_ptr()" for p in used) + ")")
    for i, slot in enumerate(located):
        lines.append(f"    at = address(buffers[{slot.position}].data_ptr())")
        lines.append(f"    if code := place(map{i}, at):")
        lines.append(f"        again(code, map{i}, at)")
    for i in numbers:
        lines.append(f"    if code := launch(config{i}, function{i}, params{i}, None):")
        lines.append(f"        recover({i}, code, config{i}, params{i})")
    lines.append("    push(frame)")
    space: dict[str, Any] = {
        "pop": free.pop,
        "push": free.append,
        "new": new,
        "raw_stream": raw_stream,
        "pack": struct.Struct(f"={len(used)}Q").pack_into,
        "launch": launch,
        "recover": recover,
        "place": maps and maps.place,
        "again": maps and maps.recover,
        "address": c_void_p,
        **{f"function{i}": functions[i] for i in numbers},
    }
    # Locals of an enclosing function are read faster than globals.
    source = f"def make({', '.join(space)}):\n    " + "\n    ".join(lines) + "\n    return enqueue\n"
    scope: dict[str, Any] = {}
    exec(compile(source, "<tilewright launch>", "exec"), scope)
    if located:
        free.append(new())
    return scope["make"](**space)  # type: ignore[no-any-return]


def _attributes(step: Step) -> ctypes.Array[Attribute] | None:
    found = [Attribute(CLUSTER_DIMENSION, 0, step.cluster)] if step.cluster != (1, 1, 1) else []
    found += [Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))] if step.pdl else []
    return (Attribute * len(found))(*found) if found else None
