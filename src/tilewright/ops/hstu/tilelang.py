"""How TileLang runs the family: launches worked out from a call's facts.

The programs are in `tilelang_programs` and `tilelang_gradients`, which import TileLang and are loaded when a launch is
compiled. Nothing here imports TileLang. Of the gradients, `keys` finds dk and dv and `queries` dq, as Triton's do; no
sum depends on timing.
"""

from __future__ import annotations

from typing import Any

from tilewright.backends.tilelang import Program
from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch
from tilewright.ops.attention.configs import width_of
from tilewright.ops.attention.tilelang import unit_of
from tilewright.ops.hstu import arguments
from tilewright.ops.tilelang_places import FULL_RANGE_DIVISION, NAMES

QUERIES = Program("tilewright.ops.hstu.tilelang_programs:queries", FULL_RANGE_DIVISION)
KEYS = Program("tilewright.ops.hstu.tilelang_gradients:keys", FULL_RANGE_DIVISION)


def forward(call: Call, config: Config) -> Launch:
    """o, and the random state where it is saved."""
    drops = arguments.dropping(call)
    args, constants = _common(call, config.m, "q")
    args |= {name: call.tensors.get(name) if drops else None for name in ("seed", "offset", "state")}
    args |= {"grad": None, "do_batch": 0, "do_row": 0, "do_head": 0, "do_step": 0, "out": call.o}
    constants |= {
        "m": config.m, "n": config.n, "threads": config.threads, "started": args["offset"] is not None,
        "saving": args["state"] is not None, "gradient": False, "stepped": False,
    }  # fmt: skip
    return Launch(QUERIES, (_count(args), 1, 1), args, constants)


def backward(call: Call, config: Config) -> list[Launch]:
    """dq, dk, dv, as far as they are needed. Of wide heads dk and dv are found one after the other: registers do not
    hold both."""
    found = []
    gives = [name for name in ("dk", "dv") if call.has(name)]
    for each in [[name] for name in gives] if config.k_apart else [gives] if gives else []:
        args, constants = _common(call, config.k_n, "k")
        outputs: dict[str, Argument] = {f"{name}_out": call[name] if name in each else None for name in ("dk", "dv")}
        constants |= {"m": config.k_m, "n": config.k_n, "threads": config.k_threads}
        constants |= {"gives_k": "dk" in each, "gives_v": "dv" in each}
        found.append(_gradient(KEYS, call, args | outputs, constants))
    if call.has("dq"):
        args, constants = _common(call, config.q_m, "q")
        args |= {"seed": None, "offset": None, "out": call.dq}
        constants |= {"m": config.q_m, "n": config.q_n, "threads": config.q_threads, "gradient": True}
        constants |= {"started": False, "saving": False}
        found.append(_gradient(QUERIES, call, args, constants))
    return found


def _gradient(program: Program, call: Call, args: dict[str, Argument], constants: dict[str, Any]) -> Launch:
    """With what both read of the upstream gradient and of dropout."""
    do: TensorFacts = call.do
    stepped = _stepped(call)
    args |= {"grad": do, "do_step": do.column_stride, "state": call.state if arguments.dropping(call) else None}
    args |= arguments.strides(do, 1 if stepped else constants["unit"])
    return Launch(program, (_count(args), 1, 1), args, constants | {"stepped": stepped})


def _stepped(call: Call) -> bool:
    return bool("do" in call.tensors and call.do.column_stride != 1)


def _count(args: dict[str, Argument]) -> int:
    count = args["programs"]
    assert isinstance(count, int)
    return count


def _common(call: Call, rows: int, main: str) -> tuple[dict[str, Argument], dict[str, Any]]:
    """Arguments and constants of a launch whose blocks have `rows` rows of `main`."""
    q, k, v = call.q, call.k, call.v
    unit = unit_of(q, k, v, *([call.do] if "do" in call.tensors and not _stepped(call) else []))
    packed = arguments.jagged(call)
    sequences = call.seq_offsets.shape[0] if packed else 0
    count = call[main].shape[-3]
    tiles = count // rows + sequences if packed else -(-count // rows)
    args: dict[str, Argument] = {
        "q": q, "k": k, "v": v, **arguments.tensors(call),
        **arguments.strides(q, unit), **arguments.strides(k, unit), **arguments.strides(v, unit),
        **arguments.numbers(call, rows, main), "tiles": tiles, "turns": sequences.bit_length(),
        "vectors": q.columns // unit, "v_vectors": v.columns // unit,
        "programs": tiles * q.shape[-2] * (1 if packed else q.shape[0]),
    }  # fmt: skip
    rules = arguments.constants(call)
    constants: dict[str, Any] = {
        "dtype": NAMES[q.dtype], "starts_dtype": _kind(args["seq_offsets"], "int32"),
        "targets_dtype": _kind(args["num_targets"], "int32"), "mask_dtype": _kind(args["mask"], "float32"),
        "d": width_of(q), "dv": width_of(v), "unit": unit,
        "packed": packed, "targeted": args["num_targets"] is not None, "scaled": args["attn_scale"] is not None,
        "has_mask": args["mask"] is not None, "causal": rules["CAUSAL"], "context": rules["CONTEXT"],
        "windowed": rules["WINDOW"], "drops": rules["DROPS"], "lifts": rules["LIFTS"],
    }  # fmt: skip
    return args, constants


def _kind(argument: Argument, otherwise: str) -> str:
    return NAMES[argument.dtype] if isinstance(argument, TensorFacts) else otherwise
