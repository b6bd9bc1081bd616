"""Compiling and keeping kernels: no compiler, a corrupt store, many processes, a fork, two threads."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright import tile
from tilewright.tile import CompilerError, TileError, ViewType
from tilewright.tile.ir.tile_ir import Most
from tilewright.tile.runtime import cpu, nvrtc, store, target
from tilewright.tile.runtime.arguments import memory_of, type_of

needs_compiler = pytest.mark.skipif(bool(target.missing()), reason=target.missing() or "a C++ compiler is here")
PROGRAM = """
import numpy as np
from tilewright import tile
from tilewright.tile.runtime import cpu

@tile.kernel(static={"x": (0,)})
def scale(t, x, y, by):
    i = t.arange(x.shape[0])
    t.store(y[i], t.load(x[i]) * by)

x = np.arange(100, dtype=np.float32)
y = np.zeros_like(x)
scale[(1,)](x, y, 3.0)
assert np.array_equal(y, 3 * x)
"""


@tile.kernel(static={"x": (1,)})
def double(t: Any, x: Any, y: Any) -> None:
    at = t.program_id(0), t.arange(x.shape[1])
    t.store(y[at], t.load(x[at]) * 2.0)


def in_process(code: str, cache: Path, **more: str) -> subprocess.Popen[str]:
    source = str(Path(tile.__file__).parent.parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "TILEWRIGHT_CACHE_DIR": str(cache), **more}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_it_imports_numpy_and_the_standard_library_alone() -> None:
    roots = set()
    for path in Path(tile.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots |= {n.partition(".")[0] for n in names if not n.startswith("tilewright.tile")}
    assert roots - sys.stdlib_module_names == {"numpy"}


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.backends.tile import TileBackend

    monkeypatch.setattr(target, "compiler", lambda: None)
    monkeypatch.setattr(nvrtc, "version", lambda: "nvrtc 1.2")
    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    backend = TileBackend()
    reason = backend.missing("cpu")
    assert reason is not None and "no C++ compiler" in str(reason)
    assert backend.version("cpu") == "" and backend.version("cuda").startswith("nvrtc 1.2, ")
    assert backend.missing("cuda") is None and backend.missing() is None and backend.targets()[0] == "sm_80"
    view = ViewType(tile.float32, (None, Most(64)))
    with pytest.raises(CompilerError, match=r"install g\+\+"):
        cpu.compile(double.trace({"x": view, "y": view}))


@needs_compiler
def test_no_compiler_for_gpus_is_a_reason_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither device's evidence is keyed by the other's compiler."""
    from tilewright.backends.tile import TileBackend

    backend = TileBackend()
    before = backend.version("cpu")
    monkeypatch.setattr(nvrtc, "version", lambda: "")
    monkeypatch.setattr(nvrtc, "missing", lambda: "neither NVRTC nor nvcc is here")
    assert "neither NVRTC nor nvcc" in str(backend.missing("cuda")) and backend.version("cuda") == ""
    assert backend.missing("cpu") is None and backend.missing() is None
    assert backend.version("cpu") == backend.version() == before and len(backend.targets()) == 1
    monkeypatch.setattr(target, "compiler", lambda: None)
    assert "no C++ compiler" in str(backend.missing()) and backend.targets() == []


def test_clang_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls itself c++ on some systems, and would refuse what is generated."""
    for name in ("g++", "c++"):
        fake = tmp_path / name
        fake.write_text("#!/bin/sh\necho 'Fancy clang version 18.1'\n")
        fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert target.compiler.__wrapped__() is None


@needs_compiler
def test_doctor_says_that_there_is_no_compiler(tmp_path: Path) -> None:
    code = "from tilewright.cli import main; main()"
    process = in_process(
        f"import sys; sys.argv = ['tilewright', 'doctor']; {code}", tmp_path, PATH=str(tmp_path), CXX=""
    )
    out, error = process.communicate(timeout=120)
    assert "no C++ compiler is on the PATH" in out, error


@needs_compiler
def test_a_kernel_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    """Three at once into one store, then one that finds it there, without a compiler that works."""
    processes = [in_process(PROGRAM, tmp_path) for _ in range(3)]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    made = list((tmp_path / "tile").glob("*.so"))
    assert len(made) == 1 and not list((tmp_path / "tile").glob(".*"))
    stamp = made[0].stat().st_mtime_ns
    _, error = in_process(PROGRAM, tmp_path).communicate(timeout=120)
    assert error == "" and made[0].stat().st_mtime_ns == stamp


def as_in_a_new_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Double a row, with nothing loaded yet."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(cache))
    monkeypatch.setattr(cpu, "_loaded", {})
    x, y = np.ones((1, 50), np.float32), np.zeros((1, 50), np.float32)
    double[1](x, y)
    assert np.array_equal(y, 2 * x)


@needs_compiler
def test_what_is_corrupt_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_in_a_new_process(tmp_path, monkeypatch)
    (made,) = (tmp_path / "tile").glob("*.so")
    for harm in (b"", b"nonsense"):
        data = made.read_bytes()
        made.unlink()  # the file that is loaded stays as it is
        made.write_bytes(data[: len(data) // 2] + harm)
        as_in_a_new_process(tmp_path, monkeypatch)
        assert len(made.read_bytes()) == len(data)


@needs_compiler
def test_a_folder_that_cannot_be_written_is_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tile").write_text("a file where the folder should be")
    as_in_a_new_process(tmp_path, monkeypatch)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def writes(data: bytes) -> Any:
    return lambda place: place.write_bytes(data) and None


def kept(where: Path, data: bytes, key: str = "key") -> Path:
    with store.Store(where).file(key, writes(data)) as path:
        return path


@pytest.mark.parametrize("mode", [None, 0o755, 0o777, 0o1777])
def test_the_folder_of_kernels_is_closed_to_others(tmp_path: Path, mode: int | None) -> None:
    where = tmp_path / "cache" / "tile"
    if mode is not None:
        where.mkdir(parents=True)
        where.chmod(mode)
    kept(where, b"code")
    assert mode_of(where) == 0o700
    assert mode is not None or mode_of(where.parent) == 0o700


def test_a_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept(tmp_path, b"code")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(store, "_closed", store._closed.__wrapped__)
    tmp_path.chmod(0o770)
    with store.Store(tmp_path).file("key", writes(b"other code")) as made:
        assert made.parent != tmp_path and made.read_bytes().startswith(b"other code")
    assert "belongs to user" in caplog.text
    assert not made.parent.exists()


def test_a_file_that_somebody_else_put_there_is_a_miss(tmp_path: Path) -> None:
    path = kept(tmp_path / "mine", b"code")
    real = tmp_path / "theirs.so"
    path.rename(real)
    path.symlink_to(real)
    again = kept(tmp_path / "mine", b"again")
    assert again.read_bytes().startswith(b"again") and again == path and not path.is_symlink()


def test_a_compiler_that_writes_nothing_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = tmp_path / "g++"
    lazy.write_text("#!/bin/sh\nexit 0\n")
    lazy.chmod(0o755)
    monkeypatch.setattr(cpu, "need_compiler", lambda: target.Compiler(str(lazy), "lazy"))
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    view = ViewType(tile.float32, (None, Most(64)))
    with pytest.raises(CompilerError, match="wrote nothing"):
        cpu.compile(double.trace({"x": view, "y": view}))
    assert list((tmp_path / "tile").iterdir()) == []


@pytest.mark.parametrize("fault", ["refuses", "hangs", "cannot be kept"])
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Neither in the store nor among temporary files, which the compiler's own passes make too."""
    places = {name: tmp_path / name for name in ("bin", "tmp", "cache")}
    for place in places.values():
        place.mkdir()
    fake = places["bin"] / "g++"
    end = {"refuses": "exit 1", "hangs": "sleep 60"}.get(fault, 'while [ "$1" != -o ]; do shift; done; echo x > "$2"')
    fake.write_text(f'#!/bin/sh\necho pass > "${{TMPDIR:-/tmp}}/cc1.s"\n{end}\n')
    fake.chmod(0o755)
    monkeypatch.setattr(cpu, "need_compiler", lambda: target.Compiler(str(fake), fault))
    monkeypatch.setattr(cpu, "SECONDS", 0.5)
    monkeypatch.setattr(tempfile, "tempdir", str(places["tmp"]))
    monkeypatch.setenv("TMPDIR", str(places["tmp"]))
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(places["cache"]))
    if fault == "cannot be kept":
        (places["cache"] / "tile").write_text("a file where the folder should be")
    view = ViewType(tile.float32, (None, Most(64)))
    with pytest.raises(CompilerError):
        cpu.compile(double.trace({"x": view, "y": view}))
    assert list(places["tmp"].iterdir()) == []
    assert [p for p in places["cache"].rglob("*") if p.name != "tile"] == []


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    old, young = tmp_path / ".0123-old.so", tmp_path / ".0123-young.so"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    kept(tmp_path, b"code")
    assert not old.exists() and young.exists()


def test_the_store_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_BYTES", 3000)
    for i in range(6):
        os.utime(kept(tmp_path, b"x" * 1000, f"key{i}"), (i, i))
    assert sorted(p.stem for p in tmp_path.glob("*.so")) == ["key4", "key5"]


@needs_compiler
def test_a_source_that_the_compiler_refuses_is_an_error_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match="refused") as caught:
        cpu._build("this is no C++", tmp_path / "x.so", target.this_cpu(), cpu.FLAGS)
    assert "error" in caught.value.log


@needs_compiler
def test_threads_and_a_forked_child_agree() -> None:
    x = np.arange(64 * 1000, dtype=np.float32).reshape(64, 1000)
    results = [np.zeros_like(x) for _ in range(4)]
    double[(64,)](x, results[0])
    workers = [threading.Thread(target=double[(64,)], args=(x, y)) for y in results[1:]]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(np.array_equal(y, 2 * x) for y in results)
    child = os.fork()
    if child == 0:  # a parallel region here would wait for threads that do not exist
        y = np.zeros_like(x)
        double[(64,)](x, y)
        os._exit(0 if np.array_equal(y, 2 * x) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


FORKS = """
import os, signal, threading
import torch

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a parallel region waits for ever
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

x = torch.randn(256, 4096)
x.exp()  # torch's threads are there from now on
y = torch.zeros_like(x)

def by_hand():
    from tilewright import tile
    @tile.kernel(static={"x": (1,)})
    def double(t, x, y):
        at = t.program_id(0), t.arange(x.shape[1])
        t.store(y[at], t.load(x[at]) * 2.0)
    double[256](x, y)
    assert y[200, 3000] == 2 * x[200, 3000]

def an_op():
    import tilewright as tw
    assert tw.silu(x, backend="tile")[0, 0].isfinite()
    assert torch.get_num_threads() > 1  # what the check took is given back

assert torch.get_num_threads() > 1
in_child(by_hand)  # imported there for the first time
in_child(lambda: in_child(by_hand))
import tilewright as tw
in_child(an_op)  # its kernel is proven there for the first time, against torch
in_child(by_hand)
"""


@needs_compiler
def test_forks_of_every_age_compute(tmp_path: Path) -> None:
    """OpenMP's threads do not come along. Whether the library was there before the fork must not matter."""
    process = in_process(FORKS, tmp_path, OMP_NUM_THREADS="2")
    _, error = process.communicate(timeout=240)
    assert process.returncode == 0, error


def test_arguments_say_what_is_wrong() -> None:
    with pytest.raises(TileError, match="no element type is called float64"):
        memory_of(np.zeros(3))
    with pytest.raises(TypeError, match="needs y"):
        double[(1,)](np.zeros((1, 4), np.float32))
    with pytest.raises(TypeError, match=r"double runs on a grid of instances: double\[\(n,\)\]\(\.\.\.\)"):
        double(np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32))
    strided = memory_of(np.zeros((4, 8), np.float32)[:, ::2])
    assert strided.strides == (8, 2) and not type_of(strided).unit
    assert type_of(strided, most={1: 64}).sizes == (4, Most(64))


def test_features_are_named_and_in_the_key() -> None:
    here = target.this_cpu()
    assert "native" not in " ".join(here.flags()) and set(here.features) <= set(target.KNOWN)
    assert str(target.Cpu("x86_64", ("avx2",))) != str(target.Cpu("x86_64", ()))
