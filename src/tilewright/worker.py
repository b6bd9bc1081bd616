"""The process in which kernels may hang or die: `python -m tilewright.worker`, one JSON request a line, one reply each.

Requests: `ping`; `compile`, `prove` and `time` of one kernel, config and call. Replies go to the real standard output;
whatever a kernel or compiler prints goes to standard error. When standard input ends, so does the process, whatever it
is doing. The client's side is `tilewright.tune.pool`; how inputs are made is `tilewright.verify.cases`; how times are
taken is `tilewright.bench.measure`.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from tilewright.core import evidence, registry
from tilewright.core.call import Call
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config, launches_of
from tilewright.tune import wire
from tilewright.tune.wire import Json


def main() -> None:
    """Serve until standard input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[Json] = queue.SimpleQueue()
    source = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a kernel that reads standard input must not eat requests
    os.close(nothing)
    threading.Thread(target=_listen, args=(source, requests), daemon=True).start()
    evidence.install_isolated_prover(None)  # this is where such kernels are checked
    while True:
        request = requests.get()
        reply = {**answer(request), "id": request.get("id")}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _listen(source: Any, requests: queue.SimpleQueue[Json]) -> None:
    for line in source:
        requests.put(json.loads(line))
    os._exit(0)  # the client is gone; a kernel that hangs in the main thread does not keep this process


def answer(request: Json) -> Json:
    """The reply to one request; errors of a kernel are answers too."""
    if request["do"] == "ping":
        return {"ok": True, "pid": os.getpid()}
    try:
        kernel = wire.kernel_from_json(request["kernel"])
        config, call = wire.config_from_json(request["config"]), wire.call_from_json(request["call"])
        return {"ok": True, **DO[request["do"]](kernel, config, call, request)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        _timing.clear()
        return {"error": _words(error), "memory": True}
    except Exception as error:  # noqa: BLE001  a kernel may raise anything: it is its reason, and the next request is served
        return {"error": _words(error), "memory": False, "lost": _device_lost()}


def _words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _device_lost() -> bool:
    """Whether the CUDA context no longer works: then this process can serve no one."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _compile(kernel: Kernel, config: Config, call: Call, request: Json) -> Json:
    """Into the artifact cache, for the device that the call names, which need not be here."""
    backend = registry.backend(kernel.backend)
    launches = launches_of(kernel.load()(call, config))
    for launch in launches:
        backend.compile(launch, call.device)
    return {"artifacts": len(launches)}


def _prove(kernel: Kernel, config: Config, call: Call, request: Json) -> Json:
    from tilewright.verify.first_use import prove

    return {"verdict": wire.verdict_to_json(prove(kernel, config, call))}


def _time(kernel: Kernel, config: Config, call: Call, request: Json) -> Json:
    from tilewright.tune.sample import Timing

    key = json.dumps([request["call"], request["seed"]])
    timing = _timing.get(key)
    if timing is None:
        _timing.clear()  # inputs of one call at a time: they may fill the device
        timing = _timing[key] = Timing(call, request["seed"])
    call_us, kernel_us = timing.sample(kernel, config)
    return {"call_us": call_us, "kernel_us": kernel_us}


_timing: dict[str, Any] = {}
DO: dict[str, Callable[[Kernel, Config, Call, Json], Json]] = {"compile": _compile, "prove": _prove, "time": _time}


if __name__ == "__main__":
    main()
