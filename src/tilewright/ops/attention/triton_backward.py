"""How Triton runs the gradients of attention and varlen_attention: which launches, with which arguments.

`attention_delta` turns what forward saved into two numbers a row: lse and delta - dlse. P is exp(S - lse) and dS is
P (dP - delta + dlse) once more, in the two that follow. `attention_keys` has a tile of keys a program, which walks the
queries of every head of their group; it works on S^T, so that P^T and dS^T are left operands as they come out of a
product. `attention_queries` has a tile of queries, which walks keys. Tiles that a mask cuts are walked apart from those
that it leaves whole. No sum depends on timing.
The programs are in `triton_backward_tiles` and `triton_backward_rows`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewright.core.call import Call, TensorFacts
from tilewright.core.launch import Argument, Config, Launch, Scratch
from tilewright.ops.attention import arguments
from tilewright.ops.attention.backward_configs import DELTA_ROWS
from tilewright.ops.attention.configs import width_of
from tilewright.ops.attention.softmax import scale_of
from tilewright.ops.attention.triton_backward_rows import attention_delta, attention_norms
from tilewright.ops.attention.triton_backward_tiles import attention_keys, attention_queries
from tilewright.ops.triton_scores import DESCRIPTOR, precision


def backward(call: Call, config: Config) -> list[Launch]:
    """dq, dk, dv, as far as they are needed: three launches, of which two find P."""
    common = _Common(call)
    stages = common.rows()
    if call.has("dk") or call.has("dv"):
        stages.append(common.keys(config))
    if call.has("dq"):
        tiles = arguments.tiles_of(call, config.q_m, 1)
        stages.append(common.launch(attention_queries, config, "q_", tiles, call.q.shape[-2], 2, dq=call.dq))
    return stages


class _Common:
    """What the launches of one call share."""

    def __init__(self, call: Call) -> None:
        q, k, v, do = call.q, call.k, call.v, call.do
        self.call = call
        self.batch = q.shape[0] if len(q.shape) == 4 else 1
        self.lines = self.batch * q.shape[-2] * q.shape[-3]
        self.unit = arguments.unit_of(q, k, v, *(t for t in (do, call.o) if t is not None))
        apart = -(-self.lines // 4) * 4
        lifts = q.dtype == torch.float16
        self.norms = Scratch("norms", (self.batch, k.shape[-2], k.shape[-3])) if lifts else None
        self.found: dict[str, Argument] = {
            "do": do, **_strides("do", do, self.unit), "stats": Scratch("stats", (3 if lifts else 2, apart)),
            "norms": self.norms, "apart": apart,
        }  # fmt: skip
        self.widths = {"DV": width_of(v), "V_WIDTH": v.columns, "UNIT": self.unit}
        drops = call.dropout_p > 0.0
        self.inputs: dict[str, Argument] = {
            **self.found, "q": q, "k": k, "v": v, "state": call.state if drops else None, "heads": q.shape[-2],
            **arguments.strides(q, self.unit), **arguments.strides(k, self.unit), **arguments.strides(v, self.unit),
            **arguments.mask_arguments(call), **_numbers(call),
        }  # fmt: skip
        self.constants = {
            **arguments.mask_constants(call), **self.widths, "DROPS": drops, "D": width_of(q), "WIDTH": q.columns,
            "GROUP": arguments.heads_of(call)["group"], "PRECISION": precision(call),
        }  # fmt: skip

    def rows(self) -> list[Launch]:
        """What goes over rows first."""
        call, v = self.call, self.call.v
        args: dict[str, Argument] = {
            **self.found, "o": call.o, "lse": call.lse, "dlse": call.dlse,
            **_strides("o", call.o, self.unit), **_row_strides("lse", call.lse), **_row_strides("dlse", call.dlse),
            "rows": call.q.shape[-3], "heads": call.q.shape[-2], "total": self.lines,
        }  # fmt: skip
        constants = {**self.widths, "R": DELTA_ROWS}
        found = [Launch(attention_delta, (-(-self.lines // DELTA_ROWS), 1, 1), args, constants, {"num_warps": 4})]
        if self.norms is not None:
            total = math.prod(self.norms.shape)
            args = {"v": v, "norms": self.norms, **arguments.strides(v, self.unit), "rows": v.shape[-3]}
            args |= {"heads": v.shape[-2], "total": total}
            found.append(Launch(attention_norms, (-(-total // DELTA_ROWS), 1, 1), args, constants, {"num_warps": 4}))
        return found

    def keys(self, config: Config) -> Launch:
        call, n = self.call, config.k_n
        count = call.k.shape[-3]
        tiles = count // n + call.cu_seqlens_k.shape[0] if "cu_seqlens_k" in call.tensors else -(-count // n)
        outputs: dict[str, Argument] = {"dk": call.dk, "dv": call.dv}
        return self.launch(attention_keys, config, "k_", tiles, call.k.shape[-2], 2, **outputs)

    def launch(
        self, function: Any, config: Config, prefix: str, tiles: int, heads: int, descriptors: int, **outputs: Argument
    ) -> Launch:
        sizes = {"M": config[f"{prefix}m"], "N": config[f"{prefix}n"], "TMA": bool(config.tma)}
        if function is attention_keys:  # where products are of warp groups and read registers
            device = self.call.device
            sizes["JOINT"] = device.kind == "cuda" and 90 <= device.sm < 100 and self.call.q.dtype.itemsize == 2
        options = {name: config[f"{prefix}{name.removeprefix('num_')}"] for name in ("num_warps", "num_stages")}
        programs, workspace = tiles * self.batch * heads, None
        if config.tma:
            workspace = Scratch(f"{prefix}descriptors", (programs * descriptors * DESCRIPTOR,), torch.uint8)
        given = {**self.inputs, **outputs, "tiles": tiles}
        return Launch(function, (programs, 1, 1), given, {**self.constants, **sizes}, options, workspace=workspace)


def _numbers(call: Call) -> dict[str, Argument]:
    """The scale with its sign, of scores and of gradients."""
    scale = scale_of(call.scale, call.q.columns)
    factor = scale if call.q.dtype == torch.float32 else scale * arguments.LOG2E
    return {**arguments.number_arguments(call), "factor": factor, "scale": scale}


def _strides(name: str, facts: TensorFacts | None, unit: int) -> dict[str, Argument]:
    """Of a gradient or of o, whose columns need not lie side by side."""
    if facts is None:
        return {f"{name}_{which}": 0 for which in ("batch", "row", "head")} | {f"{name}_step": None}
    step = facts.column_stride
    return {**arguments.strides(facts, unit), f"{name}_step": None if step == 1 else step}


def _row_strides(name: str, facts: TensorFacts | None) -> dict[str, Argument]:
    """Of [B, H, S] or [H, T]."""
    batch, head, row = (0, 0, 0) if facts is None else (0, *facts.stride)[-3:]
    return {f"{name}_batch": batch, f"{name}_head": head, f"{name}_row": row}
