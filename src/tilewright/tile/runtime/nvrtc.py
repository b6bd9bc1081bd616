"""CUDA C++ to a cubin: NVRTC through ctypes, or nvcc where it is missing. Neither needs a GPU.

NVRTC is a shared library that torch's CUDA wheels bring, and `pip install nvidia-cuda-nvrtc`. It runs in this process:
generated code has no header and little of templates, so nothing in it can take long.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilewright.tile.errors import CompilerError
from tilewright.tile.runtime.target import run_compiler

FLAGS = ("--std=c++17", "--fmad=false", "--ptxas-options=-v", "--diag-suppress=177")
"""Products and sums round apart, division and square root as IEEE 754 says, and denormals are kept."""
SECONDS = 120


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, and what ptxas said of it."""

    image: bytes
    registers: int
    spills: int
    """Bytes that a thread keeps in local memory for want of registers."""
    stack: int
    log: str


def missing() -> str:
    """Why nothing can be compiled for a GPU here, or ""."""
    return "" if nvrtc_file() or nvcc() else "neither NVRTC (pip install nvidia-cuda-nvrtc) nor nvcc is here"


def version() -> str:
    """The compiler in use; "" where there is none."""
    if nvrtc_file():
        return Nvrtc(nvrtc_file()).version
    tool = nvcc()
    return f"nvcc {_nvcc_version(tool)}" if tool else ""


@cache
def _nvcc_version(tool: str) -> str:
    text = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found.group(1) if found else text.strip().splitlines()[-1]


def compile(text: str, symbol: str, arch: str) -> Cubin:
    """Compile a tile kernel for an architecture ("sm_90"). See `compiled`."""
    image, log = compiled(text, symbol, [f"-arch={arch}", *FLAGS])
    return Cubin(image, _told(r"Used (\d+) registers", log), _told(r"(\d+) bytes spill stores", log),
                 _told(r"(\d+) bytes stack frame", log), log)  # fmt: skip


def compiled(text: str, symbol: str, flags: Sequence[str]) -> tuple[bytes, str]:
    """(cubin, log) of any source; both compilers take these flags.

    Raises:
        CompilerError: there is no compiler, or it refused; with its log.
    """
    if nvrtc_file():
        return Nvrtc(nvrtc_file()).compile(text, f"{symbol}.cu", flags)
    if tool := nvcc():
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            made = Path(folder, f"{symbol}.cubin")
            log = run_compiler(tool, ["-cubin", "-O3", *flags], text, f"{symbol}.cu", made, SECONDS)
            return made.read_bytes(), log
    raise CompilerError(missing())


def _told(pattern: str, log: str) -> int:
    return sum(int(n) for n in re.findall(pattern, log))


@cache
class Nvrtc:
    """The library in a file, loaded once."""

    def __init__(self, file: str) -> None:
        for builtins in sorted(Path(file).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # NVRTC itself looks only on the loader's path
        self.library = ctypes.CDLL(file)
        major, minor = c_int(), c_int()
        self._check(self.library.nvrtcVersion(byref(major), byref(minor)), "nvrtcVersion")
        self.version = f"nvrtc {major.value}.{minor.value}"

    def compile(self, text: str, name: str, flags: Sequence[str]) -> tuple[bytes, str]:
        """(cubin, log)"""
        program, given = c_void_p(), [*flags, "-default-device"]  # else a generic lambda is a host function before 13.5
        source, title = c_char_p(text.encode()), c_char_p(name.encode())
        self._check(self.library.nvrtcCreateProgram(byref(program), source, title, 0, None, None), name)
        try:
            array = (c_char_p * len(given))(*(flag.encode() for flag in given))
            code = self.library.nvrtcCompileProgram(program, len(given), array)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code:
                raise CompilerError(f"{name}: {self._error(code)} ({self.version}, {' '.join(given)})", log[-4000:])
            return self._read(program, "CUBIN"), log
        finally:
            self.library.nvrtcDestroyProgram(byref(program))

    def _read(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{what}Size")(program, byref(size)), what)
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{what}")(program, buffer), what)
        return buffer.raw

    def _error(self, code: int) -> str:
        function = self.library.nvrtcGetErrorString
        function.restype = c_char_p
        return (function(code) or b"").decode()

    def _check(self, code: int, what: str) -> None:
        if code:
            raise CompilerError(f"{what}: {self._error(code)}")


@cache
def nvrtc_file() -> str:
    """NVRTC in the wheels, in the toolkit, or where the loader looks; "" where it is nowhere."""
    folders = [p / "lib" for p in wheels()] + [p / sub for p in toolkits() for sub in ("lib64", "lib")]
    files = {f for folder in folders for f in folder.glob("libnvrtc.so.*") if f.suffix[1:].isdigit()}
    if files:  # a cubin loads on every driver of its major version or later: what torch was built for comes first
        torch = sys.modules.get("torch")
        major = ((torch.version.cuda if torch is not None else None) or "").split(".")[0]
        return str(max(files, key=lambda f: (f.suffix[1:] == major, int(f.suffix[1:]), str(f))))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    return ""


@cache
def nvcc() -> str:
    tools = (folder / "bin/nvcc" for folder in toolkits())
    return next((str(tool) for tool in tools if tool.is_file()), shutil.which("nvcc") or "")


def wheels() -> list[Path]:
    """The folders of NVIDIA's wheels: nvidia/cu13, nvidia/cuda_nvrtc, ..."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(child for root in roots for child in Path(root).glob("cu*") if child.is_dir())


def toolkits() -> list[Path]:
    """The folders of whole toolkits."""
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if tool := shutil.which("nvcc"):
        named.append(str(Path(tool).resolve().parent.parent))
    return [Path(folder) for folder in named if folder and Path(folder).is_dir()]
