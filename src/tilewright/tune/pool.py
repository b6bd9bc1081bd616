"""Worker processes as their client sees them: started on demand, asked one thing at a time, killed when they hang.

What a worker does with a request is in `tilewright.worker`. Nothing a kernel does in a worker (hang, crash, corrupt the
CUDA context) reaches this process: it becomes a `WorkerFailed` with the reason.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Literal

from tilewright.core.cache import disk
from tilewright.core.call import Call
from tilewright.core.device import Device
from tilewright.core.errors import TilewrightError
from tilewright.core.evidence import Verdict
from tilewright.core.kernel import Kernel
from tilewright.core.launch import Config
from tilewright.tune.wire import Json, job, verdict_from_json

Failure = Literal["hung", "died", "error", "memory"]
TAIL_BYTES = 2000


class WorkerFailed(TilewrightError, RuntimeError):
    """A request that a worker could not answer. `kind`: it hung and was killed, it died, the kernel raised an error
    there, or the device was out of memory. Lasts no longer than this process."""

    def __init__(self, kind: Failure, message: str) -> None:
        self.kind = kind
        super().__init__(message)


@dataclass(frozen=True)
class Limits:
    """Seconds that a worker may take before it counts as hung."""

    start: float = 180.0
    compile: float = 300.0
    prove: float = 180.0
    time: float = 120.0


LIMITS = Limits()


class Worker:
    """One `python -m tilewright.worker`, started by the first request and again after it died."""

    def __init__(self, *, sees_gpu: bool = True, limits: Limits = LIMITS) -> None:
        self.sees_gpu, self.limits = sees_gpu, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._replies: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._count = 0

    def ask(self, request: Json, seconds: float) -> Json:
        """The reply to one request.

        Raises:
            WorkerFailed: no reply within `seconds`, the worker died, or the request failed in it.
        """
        if self._process is None:
            self._start()
            self._exchange({"do": "ping"}, self.limits.start, "start")
        return self._exchange(request, seconds, request["do"])

    def close(self) -> None:
        """End the process and what it started; without harm when there is none."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
        except ProcessLookupError:
            pass
        process.wait()
        assert process.stdin is not None and self._errors is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        self._errors.close()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        if not sys.executable:
            raise TilewrightError("this Python does not know its own executable: workers cannot be started")
        environment = dict(os.environ)
        # The worker sees the same packages, this one and plug-ins that only this process's path leads to included.
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in sys.path if os.path.exists(p or "."))
        if not self.sees_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = environment["HIP_VISIBLE_DEVICES"] = ""
        self._errors = tempfile.TemporaryFile(prefix="tilewright-worker-")  # noqa: SIM115  closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilewright.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the client; killing it takes its children along
        )
        self._replies = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process.stdout, self._replies), daemon=True).start()

    def _exchange(self, request: Json, seconds: float, what: str) -> Json:
        process = self._process
        assert process is not None and process.stdin is not None
        self._count += 1
        try:
            process.stdin.write(json.dumps({**request, "id": self._count}).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            raise self._died(what) from None
        until = time.monotonic() + seconds
        while True:
            try:
                line = self._replies.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.close()
                raise WorkerFailed("hung", f"{what}: no answer within {seconds:g} s; the worker was killed") from None
            except BaseException:
                self.close()  # an interrupt leaves the reply to come; the next request must not meet it
                raise
            if line is None:
                raise self._died(what)
            reply: Json = json.loads(line)
            if reply.get("id") == self._count:
                break
        if reply.get("lost"):
            self.close()  # its device context is gone: the next request gets a fresh one
        if "error" in reply:
            raise WorkerFailed("memory" if reply.get("memory") else "error", reply["error"])
        return reply

    def _died(self, what: str) -> WorkerFailed:
        process, errors = self._process, self._errors
        if process is None or errors is None:
            return WorkerFailed("died", f"{what}: the worker was closed")
        try:
            code: int | None = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        errors.seek(0, os.SEEK_END)
        errors.seek(max(0, errors.tell() - TAIL_BYTES))
        tail = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
        self.close()
        if code is None:
            how = "closed its pipe"
        else:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        return WorkerFailed("died", f"{what}: the worker died ({how})" + (f": {tail[-1].strip()}" if tail else ""))


def _read(stream: IO[bytes], replies: queue.SimpleQueue[bytes | None]) -> None:
    with stream:
        for line in stream:
            replies.put(line)
    replies.put(None)


class Pool:
    """The workers of one tuning run: one that runs kernels, and several that compile and see no GPU."""

    def __init__(self, *, compilers: int | None = None, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.compilers = compilers or max(1, min(8, (os.cpu_count() or 2) - 1))
        self.runner = Worker(limits=limits)
        self._compile_workers: list[Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in (self.runner, *self._compile_workers):
            worker.close()
        self._compile_workers.clear()

    def prove(self, kernel: Kernel, config: Config, call: Call) -> Verdict:
        reply = self.runner.ask(job("prove", kernel, config, call), self.limits.prove)
        return verdict_from_json(reply["verdict"])

    def time(self, kernel: Kernel, config: Config, call: Call, seed: int = 0) -> tuple[float, float]:
        """One sample of (call, kernel) microseconds. The first for a pair also compiles, loads and warms it."""
        reply = self.runner.ask(job("time", kernel, config, call, seed=seed), self.limits.time)
        return reply["call_us"], reply["kernel_us"]

    def compile(
        self,
        jobs: Sequence[tuple[Kernel, Config, Call]],
        done: Callable[[int, WorkerFailed | None], None] = lambda place, failure: None,
    ) -> list[WorkerFailed | None]:
        """Compile all into the artifact cache, several at a time; what failed stands at its place in the result."""
        results: list[WorkerFailed | None] = [None] * len(jobs)
        while len(self._compile_workers) < min(self.compilers, len(jobs)):
            self._compile_workers.append(Worker(sees_gpu=False, limits=self.limits))
        free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._compile_workers:
            free.put(worker)

        def one(place: int) -> None:
            worker = free.get()
            try:
                worker.ask(job("compile", *jobs[place]), self.limits.compile)
            except WorkerFailed as failure:
                results[place] = failure
            finally:
                free.put(worker)

        with ThreadPoolExecutor(max(1, len(self._compile_workers))) as threads:
            waiting: dict[Future[None], int] = {threads.submit(one, place): place for place in range(len(jobs))}
            try:
                while waiting:
                    finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in finished:
                        place = waiting.pop(future)
                        future.result()
                        done(place, results[place])
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for worker in self._compile_workers:
                    worker.close()
                raise
        return results


@contextmanager
def alone_on(device: Device) -> Iterator[None]:
    """Times are taken by one process at a time on each device."""
    with disk().locked("locks", f"timing {device.kind} {device.name} {device.index}", timeout=3600.0):
        yield


class _Shared:
    """The worker of first-use checks: one a process, ended after a minute without a request."""

    IDLE_SECONDS = 60.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._timer: threading.Timer | None = None

    def prove(self, kernel: Kernel, config: Config, call: Call, limits: Limits) -> Verdict:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._worker is None:
                self._worker = Worker(limits=limits)
                atexit.register(self.close)
            try:
                reply = self._worker.ask(job("prove", kernel, config, call), limits.prove)
            finally:
                self._timer = threading.Timer(self.IDLE_SECONDS, self.close)
                self._timer.daemon = True
                self._timer.start()
        return verdict_from_json(reply["verdict"])

    def close(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.close()
                atexit.unregister(self.close)


_shared = _Shared()


def prove_in_worker(kernel: Kernel, config: Config, call: Call, limits: Limits = LIMITS) -> Verdict:
    """Check a kernel that is new to every architecture where it can do no harm.

    Raises:
        WorkerFailed: it hung, crashed, or failed to compile or launch there: a launch error, which lasts the process.
    """
    try:
        return _shared.prove(kernel, config, call, limits)
    except WorkerFailed as failure:
        if failure.kind == "memory":
            return Verdict(None, where=call.device.arch, detail=str(failure))
        raise
