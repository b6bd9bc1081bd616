"""The JSON forms of calls, kernels and verdicts that travel between a process and its workers.

Plain data only, nothing is pickled. A kernel travels by name and digest: the worker finds or imports it itself and
refuses it when its source has changed meanwhile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.core import registry
from tilewright.core.call import Call, TensorFacts
from tilewright.core.device import Device
from tilewright.core.errors import TilewrightError
from tilewright.core.evidence import Verdict
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config

Json = dict[str, Any]


def dtype_to_json(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_from_json(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def call_to_json(call: Call) -> Json:
    return {
        "op": call.op,
        "device": dataclasses.asdict(call.device),
        "tensors": {name: None if facts is None else _tensor_to_json(facts) for name, facts in call.tensors.items()},
        "options": {name: _option_to_json(value) for name, value in call.options.items()},
        "saving": call.saving,
        "deterministic": call.deterministic,
        "outputs": list(call.outputs),
        "into": dict(call.into),
        "anywhere": call.anywhere,
    }


def call_from_json(data: Mapping[str, Any]) -> Call:
    return Call(
        data["op"],
        Device(**data["device"]),
        {name: None if t is None else _tensor_from_json(name, t) for name, t in data["tensors"].items()},
        {name: _option_from_json(value) for name, value in data["options"].items()},
        data["saving"],
        data["deterministic"],
        tuple(data["outputs"]),
        data["into"],
        data["anywhere"],
    )


def _option_to_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_to_json(value)}
    return list(value) if isinstance(value, tuple) else value


def _option_from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return dtype_from_json(value["dtype"])
    return tuple(value) if isinstance(value, list) else value


def _tensor_to_json(facts: TensorFacts) -> Json:
    return {
        "shape": list(facts.shape),
        "stride": list(facts.stride),
        "dtype": dtype_to_json(facts.dtype),
        "align": facts.align,
        "needs_grad": facts.needs_grad,
    }


def _tensor_from_json(name: str, data: Mapping[str, Any]) -> TensorFacts:
    return TensorFacts(
        name,
        tuple(data["shape"]),
        tuple(data["stride"]),
        dtype_from_json(data["dtype"]),
        data["align"],
        data["needs_grad"],
    )


def kernel_to_json(kernel: Kernel) -> Json:
    return {
        "op": kernel.op,
        "backend": kernel.backend,
        "label": kernel.label,
        "source": kernel.source,
        "files": list(kernel.files),
        "digest": kernel.digest,
    }


def kernel_from_json(data: Mapping[str, Any]) -> Kernel:
    """The registered kernel (plug-ins included), else one made from its source.

    Raises:
        TilewrightError: the source is another one here than it was when the request was written.
    """
    names = (data["backend"], data["label"], data["source"])
    registered = (k for k in registry.kernels_of(data["op"]) if (k.backend, k.label, k.source) == names)
    kernel = next(registered, None)
    if kernel is None:
        kernel = Kernel(data["op"], data["backend"], data["source"], files=tuple(data["files"]), label=data["label"])
    if kernel.digest != data["digest"]:
        raise TilewrightError(f"{kernel}: its source changed while the process that asks was running; start that anew")
    return kernel


def config_from_json(data: Mapping[str, int]) -> Config:
    return Config(**data)


def verdict_to_json(verdict: Verdict) -> Json:
    return {name: value for name, value in dataclasses.asdict(verdict).items() if name != "shipped"}


def verdict_from_json(data: Mapping[str, Any]) -> Verdict:
    return Verdict(**data)


def job(do: str, kernel: Kernel, config: Config, call: Call, **more: Any) -> Json:
    """A request about one kernel, one config and one call."""
    return {"do": do, "kernel": kernel_to_json(kernel), "config": dict(config), "call": call_to_json(call), **more}
