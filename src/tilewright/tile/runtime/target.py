"""The CPU that code is made for: its features by name, and the compiler that is here. How a compiler is run."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilewright.tile.errors import CompilerError

KNOWN = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq")
"""Features that generated code may use; each is a flag of the compiler. Never "native": an object is kept, and may be
read by another CPU that shares the disk."""


@dataclass(frozen=True)
class Cpu:
    """An architecture and a sorted set of features."""

    machine: str
    features: tuple[str, ...]

    def flags(self) -> list[str]:
        return [f"-m{f}" for f in self.features]

    def __str__(self) -> str:
        return " ".join((self.machine, *self.features))


@cache
def this_cpu() -> Cpu:
    """The CPU of this process."""
    machine = platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Cpu(machine, ())
    words = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    return Cpu(machine, tuple(sorted(set(words) & set(KNOWN))))


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: where it is and what it says that it is."""

    path: str
    version: str


@cache
def compiler() -> Compiler | None:
    """The first GNU compiler of `CXX`, g++ and c++; None where there is none. Clang lacks some vector builtins."""
    for name in (os.environ.get("CXX", ""), "g++", "c++"):
        if path := shutil.which(name):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
                if "clang" not in run.stdout.lower():
                    return Compiler(path, run.stdout.splitlines()[0] if run.stdout else "")
    return None


def missing() -> str:
    """Why nothing can be compiled here, or ""."""
    if platform.system() != "Linux":
        return f"CPU kernels are compiled on Linux; this is {platform.system()}"
    return "" if compiler() is not None else "no C++ compiler is on the PATH that is GNU's (g++)"


def need_compiler() -> Compiler:
    """The compiler, or `CompilerError` with the reason."""
    found = compiler()
    if found is None or missing():
        raise CompilerError(f"{missing()}; install g++")
    return found


def run_compiler(tool: str, flags: Sequence[str], text: str, name: str, made: Path, seconds: float) -> str:
    """Compile a source, under the name of a file, and return what the compiler said.

    Raises:
        CompilerError: it refused, or took longer than so many seconds.
    """
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        file = Path(folder, name)
        file.write_text(text, encoding="utf-8")
        with subprocess.Popen(
            [tool, *flags, str(file), "-o", str(made)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
        ) as run:  # fmt: skip
            try:
                said, _ = run.communicate(timeout=seconds)
            except BaseException as error:
                os.killpg(run.pid, signal.SIGKILL)  # a driver that dies leaves its passes behind
                if isinstance(error, subprocess.TimeoutExpired):
                    raise CompilerError(f"{tool} took more than {seconds} s") from None
                raise
    if run.returncode:
        raise CompilerError(f"{tool} refused {name} ({run.returncode}; {' '.join(flags)})", said[-4000:])
    return said
