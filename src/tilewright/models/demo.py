"""The main job on real input: a sentence encoder with real weights, its norms and its products served by the library.

`run` embeds sentences, replaces the model's norms and linear layers, checks that the embeddings agree, tunes the shapes
that it met, and shows which kernel serves which op, why, and what it did to the encoder's time, be it faster or slower.
The encoder itself is in `encoder.py`.
"""

from __future__ import annotations

import json as json_module
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.core.device import default_device, device_of, torch_device
from tilewright.core.policy import current, use
from tilewright.core.selection import Selection, weigh
from tilewright.models import encoder
from tilewright.models.patching import Report, patch, unpatch
from tilewright.ops.linear import linear
from tilewright.ops.norm import layer_norm
from tilewright.tune import calls_of, tune
from tilewright.tune.rounds import Effort

QUERIES = [
    "How do I teach a neural network to translate?",
    "When should the tomatoes be watered?",
    "The spacecraft entered orbit around the red planet.",
]
SENTENCES = [
    "Attention layers let a model relate every word of a sentence to every other.",
    "Training a translation model needs pairs of sentences in two languages.",
    "Gradient descent moves the weights a small step against the slope of the loss.",
    "Water vegetables early in the morning, before the sun is high.",
    "Slugs can ruin a bed of lettuce in a single night.",
    "Prune the apple tree in late winter while it is dormant.",
    "The probe fired its engine for half an hour and was captured by Mars.",
    "Saturn's rings are mostly ice, in pieces from dust to houses.",
    "The central bank left its interest rate unchanged on Thursday.",
    "Let the dough rise under a towel until it has doubled.",
    "The orchestra tuned for a minute before the conductor came in.",
    "Heavy snow closed the mountain pass for the third day.",
]
FLOAT32_LIMIT = 1e-5
"""Embeddings have length 1; float32 sums of 384 terms in another order differ by about 1e-7."""
HALF_FACTOR, HALF_MARGIN = 1.5, 1e-3
"""In bf16 the patched model may be as far from the float32 embeddings as the unpatched one is, and a little further."""
EFFORT = Effort(least=3, most=8, seconds=4.0)
ROUNDS, LEAST_ROUNDS, TIMING_SECONDS = 15, 5, 6.0


@dataclass(frozen=True)
class Agreement:
    """Patched against unpatched embeddings. `limit` is on `max_difference`."""

    dtype: str
    kernels: str
    max_difference: float
    limit: float
    min_cosine: float
    same_matches: bool

    @property
    def passed(self) -> bool:
        return self.max_difference <= self.limit and (self.same_matches or self.dtype != "float32")


@dataclass(frozen=True)
class Timing:
    """The encoder's milliseconds a batch before and after, and the quartiles of after / before over paired rounds.
    `rival` is what "before" was, if not the model as it came."""

    dtype: str
    before_ms: float
    after_ms: float
    low: float
    high: float
    rounds: int
    rival: str = "before"

    def __str__(self) -> str:
        ratio = self.after_ms / self.before_ms
        if self.low <= 1 <= self.high:
            verdict = "no difference that this run can tell"
        else:
            verdict = f"{1 - ratio:.1%} faster" if ratio < 1 else f"{ratio - 1:.1%} slower"
        span = f"after/before {self.low:.3f} to {self.high:.3f}, middle half of {self.rounds} rounds"
        return f"{self.before_ms:.2f} ms {self.rival}, {self.after_ms:.2f} ms after: {verdict} ({span})"


def run(device: str | None = None, json: bool = False, compile: bool = False) -> int:
    """Run the demo; prints to standard output (to standard error beside `json`).

    Args:
        device: "cpu" or "cuda"; the GPU if there is one. float32 on a CPU; float32 and bf16 on a GPU.
        json: print the findings as JSON.
        compile: time the encoder beside one whose layers torch.compile made, too.

    Returns:
        The exit code: 0 if every check passed, 1 if embeddings disagree or a package is missing.
    """
    absent = encoder.missing()
    if absent is not None:
        print(f"the demo cannot run here: {absent}", file=sys.stderr)
        return 1
    where = torch_device(device) if device else default_device()
    demo = _Demo(where, compile, lambda text="": print(text, file=sys.stderr if json else sys.stdout, flush=True))
    failed = demo.all()
    if json:
        print(json_module.dumps(demo.findings, indent=1))
    return int(failed)


class _Demo:
    def __init__(self, where: torch.device, compile: bool, say: Callable[..., None]) -> None:
        self.where, self.compile, self.say = where, compile, say
        self.findings: dict[str, Any] = {"device": str(device_of(where.type, where.index))}
        self.agreements: list[Agreement] = []
        self.truth = torch.empty(0)

    def all(self) -> bool:
        dtypes = [torch.float32, torch.bfloat16] if self.where.type == "cuda" else [torch.float32]
        self.say(f"MiniLM sentence encoder, {len(SENTENCES)} sentences, on {self.findings['device']}")
        for dtype in dtypes:
            self._one(dtype)
        self.findings["agreements"] = [{**asdict(a), "passed": a.passed} for a in self.agreements]
        failed = [a for a in self.agreements if not a.passed]
        self.say(f"\n{len(self.agreements) - len(failed)} of {len(self.agreements)} agreement checks passed")
        return bool(failed)

    def _one(self, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        model = encoder.Encoder(QUERIES + SENTENCES, self.where, dtype)
        before = model.embed_by_torch().float()
        if dtype == torch.float32:
            self.truth = before
        report = _patch(model)
        self.say(f"\n== {name}\npatched:\n{textwrap.indent(str(report), '  ')}")
        after = model.embed().float()
        self._agree(name, "as chosen before tuning", before, after)
        if dtype == torch.float32:
            self._show_matches(before, after)
        self._tune(model)
        for op in (layer_norm.name, linear.name):
            for backend in self._backends(model, op):
                with use(backend=backend, ops=[op], strict=True):
                    self._agree(name, f"{op} by {backend}", before, model.embed().float())
        self._agree(name, "as tuned", before, model.embed().float())
        self._explain(name, model)
        timings = [self._time(name, model)]
        if self.compile:
            timings.append(self._time_beside_compiled(name, model, dtype))
        for timing in timings:
            self.say(f"\nthe encoder, {len(QUERIES + SENTENCES)} texts a batch: {timing}")
        self.findings[name] = {
            "replaced": [asdict(p) for p in report.replaced],
            "kept": [asdict(k) for k in report.kept],
            "kernels": [_facts(s) for s in self._met(model)],
            "time": asdict(timings[0]),
            "time_beside_compiled": asdict(timings[-1]) if self.compile else None,
        }

    def _agree(self, dtype: str, kernels: str, before: Tensor, after: Tensor) -> None:
        limit = FLOAT32_LIMIT
        if dtype != "float32":  # both are judged by the float32 embeddings
            limit = HALF_FACTOR * _gap(before, self.truth) + HALF_MARGIN
            before = self.truth
        same = torch.equal(_matches(before)[0], _matches(after)[0])
        cosine = torch.nn.functional.cosine_similarity(before, after).min().item()
        found = Agreement(dtype, kernels, _gap(before, after), limit, cosine, same)
        self.agreements.append(found)
        mark = "agree" if found.passed else "DISAGREE"
        against = "unpatched" if dtype == "float32" else "unpatched float32"
        self.say(
            f"embeddings {mark} with {against} ({kernels}): largest difference {found.max_difference:.2e} "
            f"(limit {limit:.1e}), smallest cosine {cosine:.7f}"
        )

    def _show_matches(self, before: Tensor, after: Tensor) -> None:
        (old, old_scores), (new, new_scores) = _matches(before), _matches(after)
        self.findings["matches"] = []
        self.say("\nthe closest sentence to each query:")
        for i, query in enumerate(QUERIES):
            found, score = SENTENCES[int(new[i])], float(new_scores[i])
            was, was_score = SENTENCES[int(old[i])], float(old_scores[i])
            self.say(f"  {query}\n    before {was_score:.4f}  {was}\n    after  {score:.4f}  {found}")
            self.findings["matches"].append(
                {"query": query, "before": was, "before_score": was_score, "after": found, "after_score": score}
            )

    def _met(self, model: encoder.Encoder) -> list[Selection]:
        """How each class of calls that the patched encoder makes is served now."""
        return [weigh(call, current()) for call in calls_of(model.embed)]

    def _backends(self, model: encoder.Encoder, op: str) -> list[str]:
        """Those with a kernel that takes every call of `op` here. Compiling inductor's again in this process takes a
        CPU longer than the rest of the demo; its evidence comes from the tuner's worker."""
        calls = [{c.backend: None for c in s.candidates if c.fits} for s in self._met(model) if s.call.op == op]
        found = [backend for backend in calls[0] if all(backend in fitting for fitting in calls)]
        return [b for b in found if b != "inductor" or self.where.type == "cuda"]

    def _tune(self, model: encoder.Encoder) -> None:
        self.say("\ntuning the shapes that it met, in processes of their own (kept for next time) ...")
        start = time.perf_counter()
        with _bar() as progress:
            report = tune(calls=[s.call for s in self._met(model)], effort=EFFORT, progress=progress)
        timed = sum(len(c.times) for c in report.classes)
        kept = sum(c.kept for c in report.classes)
        seconds = time.perf_counter() - start
        self.say(f"timed {timed} (kernel, config) pairs, {kept} known from before, in {seconds:.0f} s")
        if report.rough:
            self.say(report.rough)
        for failure in report.failures:
            self.say(f"  out: {failure.kernel} {failure.config}: {failure.kind}: {failure.reason}")

    def _explain(self, name: str, model: encoder.Encoder) -> None:
        self.say()
        for selection in self._met(model):
            self.say(str(selection))

    def _time(self, name: str, model: encoder.Encoder) -> Timing:
        def patched() -> float:
            _patch(model)
            return self._milliseconds(model.embed)

        def plain() -> float:
            unpatch(model.model)
            return self._milliseconds(model.embed_by_torch)

        found = self._by_turns(name, plain, patched)
        _patch(model)
        return found

    def _time_beside_compiled(self, name: str, model: encoder.Encoder, dtype: torch.dtype) -> Timing:
        """The rival is the model as it came, with each layer compiled by itself: no patch, and no break in a graph."""
        rival = encoder.Encoder(QUERIES + SENTENCES, self.where, dtype)
        for layer in rival.model.encoder.layer:
            layer.compile(dynamic=False)
        return self._by_turns(
            name,
            lambda: self._milliseconds(rival.embed_by_torch),
            lambda: self._milliseconds(model.embed),
            "by torch.compile, layer by layer",
        )

    def _by_turns(
        self, name: str, before: Callable[[], float], after: Callable[[], float], rival: str = "before"
    ) -> Timing:
        """Milliseconds of both by turns (A B B A), so that the machine's drift meets both alike."""
        after(), before()  # the first of each finds caches cold, or compiles
        new: list[float] = []
        old: list[float] = []
        end = time.perf_counter() + TIMING_SECONDS
        for number in range(ROUNDS):
            if number >= LEAST_ROUNDS and time.perf_counter() > end:
                break
            for is_new in (True, False) if number % 2 else (False, True):
                (new if is_new else old).append(after() if is_new else before())
        low, _, high = statistics.quantiles([a / b for a, b in zip(new, old, strict=True)], n=4)
        return Timing(name, statistics.median(old), statistics.median(new), low, high, len(old), rival)

    def _milliseconds(self, call: Callable[[], Tensor]) -> float:
        call()  # the first after a switch finds caches cold
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return (time.perf_counter() - start) * 1e3

    def _wait(self) -> None:
        if self.where.type == "cuda":
            torch.cuda.synchronize(self.where)


def _patch(model: encoder.Encoder) -> Report:
    return patch(model.model, linears=True)


def _gap(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def _matches(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest sentence of each query by cosine, and how near."""
    scores = embeddings[: len(QUERIES)] @ embeddings[len(QUERIES) :].T
    best = scores.max(-1)
    return best.indices, best.values


def _facts(selection: Selection) -> dict[str, Any]:
    chosen = selection.chosen
    return {
        "op": selection.call.op,
        "call_class": selection.call_class,
        "chosen": chosen.kernel.name if chosen else None,
        "config": str(chosen.config or "") if chosen else "",
        "why": selection.why,
        "candidates": [
            {
                "kernel": c.kernel.name,
                "config": str(c.config or ""),
                "call_us": c.time.call_us if c.time else None,
                "kernel_us": c.time.kernel_us if c.time else None,
                "reasons": [str(r) for r in c.reasons],
            }
            for c in selection.candidates
        ],
    }


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, for the tuner."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TimeElapsedColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda done, total, text: progress.update(task, completed=done, total=total, description=text)
