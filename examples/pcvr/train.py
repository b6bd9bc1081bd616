"""Trains the conversion-rate model and prints loss, step time and peak memory.

    python examples/pcvr/train.py --ops torch
    python examples/pcvr/train.py --ops tilewright
    python examples/pcvr/train.py --ops torch --same-masks      # the loss curve of --ops tilewright, by torch
    python examples/pcvr/train.py --sparse                      # gradients of the rows that a batch has, and no others

The same seed gives the same data, parameters and, with --same-masks, dropout masks. The sizes are those of a GPU; on a
CPU pass smaller ones: --batch 256 --ids 2000 --width 32.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from data import Sizes, batch
from model import SAME_MASKS, TILEWRIGHT, TORCH, Functions, Model

POSITIVE = 2.0
"""How much a conversion weighs beside its absence."""


@dataclass
class Run:
    """What one training run found. Times leave out the first third of the steps, in which compilers work."""

    ops: str
    device: str
    sparse: bool = False
    losses: list[float] = field(default_factory=list)
    step_ms: float = 0.0
    step_ms_iqr: float = 0.0
    peak_mib: float = 0.0
    table_gradients_mib: float = 0.0
    """Of the last step, as the optimizer is given them."""


def train(
    name: str, functions: Functions, sizes: Sizes, *, width: int, depth: int, p: float, steps: int, seed: int,
    dtype: torch.dtype, device: torch.device, compiled: bool = False, sparse: bool = False,
) -> Run:  # fmt: skip
    """`steps` steps from parameters that `seed` decides. SGD takes the tables' gradients dense or sparse, to the same
    end."""
    torch.manual_seed(seed)
    model = Model(sizes.fields, sizes.ids, width, depth, p, sparse).to(device, dtype)
    call = torch.compile(model) if compiled else model
    tables = set(model.tables.parameters())
    dense = [parameter for parameter in model.parameters() if parameter not in tables]
    gpu = device.type == "cuda"
    optimizers = [torch.optim.SGD(list(tables), lr=0.5), torch.optim.AdamW(dense, lr=2e-3, fused=gpu)]
    key = torch.full((1,), seed, dtype=torch.int64, device=device)
    weight = torch.full((1,), POSITIVE, dtype=dtype, device=device)
    run, times, kept = Run(name, str(device), sparse), [], []
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(steps):
        ids, labels = batch(sizes, seed, step, device)
        if gpu:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        loss = functions.loss(call(ids, functions, key, step), labels.to(dtype), weight)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if gpu:
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
        kept.append(loss.detach())
    run.table_gradients_mib = sum(_bytes(table.grad) for table in tables) / 2**20
    run.losses = [float(loss) for loss in kept]
    late = times[steps // 3 :]
    run.step_ms = statistics.median(late)
    if len(late) > 1:
        lower, _, upper = statistics.quantiles(late, n=4)
        run.step_ms_iqr = upper - lower
    run.peak_mib = (
        torch.cuda.max_memory_allocated(device) / 2**20
        if gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    )
    return run


def _bytes(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return 0
    parts = (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,)
    return sum(part.numel() * part.element_size() for part in parts)


def main(arguments: list[str] | None = None) -> Run:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", choices=("torch", "compile", "tilewright"), default="tilewright")
    parser.add_argument("--same-masks", action="store_true", help="torch draws the masks of tw.dropout_add")
    parser.add_argument("--sparse", action="store_true", help="sparse gradients of the tables")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--fields", type=int, default=4)
    parser.add_argument("--bag", type=int, default=32, help="most ids of an example and field")
    parser.add_argument("--ids", type=int, default=500_000, help="of each field")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    o = parser.parse_args(arguments)
    functions = TILEWRIGHT if o.ops == "tilewright" else SAME_MASKS if o.same_masks else TORCH
    run = train(
        o.ops, functions, Sizes(o.batch, o.fields, o.bag, o.ids), width=o.width, depth=o.depth, p=o.dropout,
        steps=o.steps, seed=o.seed, dtype=getattr(torch, o.dtype), device=torch.device(o.device),
        compiled=o.ops == "compile", sparse=o.sparse,
    )  # fmt: skip
    if o.json:
        print(json.dumps(asdict(run)))
        return run
    for step in sorted({*range(0, o.steps, max(1, o.steps // 10)), o.steps - 1}):
        print(f"step {step:4d}   loss {run.losses[step]:.5f}")
    print(
        f"{o.ops} on {run.device}: {run.step_ms:.2f} ms a step (middle half within {run.step_ms_iqr:.2f} ms), ", end=""
    )
    print(f"{run.peak_mib:.0f} MiB at the most")
    kind = "sparse" if run.sparse else "dense"
    print(f"table gradients: {kind}, {run.table_gradients_mib:.1f} MiB a step of {o.fields} tables")
    return run


if __name__ == "__main__":
    main()
