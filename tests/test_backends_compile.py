"""Backends that compile, without a GPU: Triton and CUDA C++ to cubins for named architectures, and the one launcher.

Triton compiles in one child process without TRITON_INTERPRET (this file, run as a script); the interpreter runs here.
The launcher runs against a small C library with the driver's calling convention, whose "kernels" are host functions.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.backends import cubin, cuda, enqueue
from tilewright.backends import triton as tw_triton
from tilewright.core.backend import Artifact, Parameter
from tilewright.core.call import Call, TensorFacts
from tilewright.core.device import Device, device_of, target_device
from tilewright.core.launch import Launch, Scratch, TensorMap, scratches
from tilewright.tile.runtime import nvrtc

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

H100 = target_device("sm_90")


@triton.jit(do_not_specialize=["n"])
def scale(x, weight, y, n, factor, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n).to(tl.float32) * factor
    if HAS_WEIGHT:
        value *= tl.load(weight + at, mask=at < n).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < n)


def _same_name(sign: int) -> Any:
    if sign > 0:

        @triton.jit
        def twin(x, n):
            tl.store(x + tl.program_id(0), n + 1)
    else:

        @triton.jit
        def twin(x, n):
            tl.store(x + tl.program_id(0), n - 1)

    return twin


def _launch(n: int = 1000, align: int = 16, weight: bool = False, **options: int) -> Launch:
    x, y = TensorFacts("x", (n,), (1,), torch.bfloat16, align), TensorFacts.dense("y", (n,), torch.bfloat16)
    return Launch(
        scale,
        ((n + 255) // 256, 1, 1),
        {"x": x, "weight": dataclasses.replace(x, name="weight") if weight else None, "y": y, "n": n, "factor": 3.0},
        {"HAS_WEIGHT": weight, "BLOCK": 256},
        {"num_warps": 4, **options},
    )


# What the child process does ---------------------------------------------------------------------------------------


def _compile_all() -> dict[str, Any]:
    backend = tw_triton.TritonBackend()

    def facts(launch: Launch, device: Device = H100) -> dict[str, Any]:
        artifact = backend.compile(launch, device)
        found: dict[str, Any] = dataclasses.asdict(artifact)
        found["bytes"] = len(found.pop("image"))
        if device.kind == "cuda":
            found["resources"] = tw_triton.resources(artifact)
        return found

    def error(launch: Launch, device: Device = H100) -> str:
        try:
            backend.compile(launch, device)
        except (TypeError, ValueError) as problem:
            return f"{type(problem).__name__}: {problem}"
        return ""

    x = TensorFacts.dense("x", (4,), torch.int64)
    twins = [Launch(_same_name(sign), (4, 1, 1), {"x": x, "n": 7}) for sign in (1, -1)]
    images = [backend.compile(twin, H100).image for twin in twins]
    plain = _launch()
    return {
        "path": tw_triton.launch_path(),
        "sm_90": facts(plain),
        "weight": facts(_launch(weight=True)),
        "cluster": facts(_launch(num_ctas=2)),
        "others": {arch: facts(plain, target_device(arch))["bytes"] for arch in ("sm_80", "sm_100", "gfx942")},
        "keys": [
            tw_triton._Compilation(_launch(n, align), H100).key for n, align in ((1000, 16), (1008, 16), (1000, 2))
        ],
        "twins_differ": images[0] != images[1],
        "absent": error(dataclasses.replace(plain, args={"x": x})),
        "constexpr": error(
            dataclasses.replace(plain, args={**plain.args, "BLOCK": 256}, constants={"HAS_WEIGHT": False})
        ),
        "dtype": error(Launch(_same_name(1), (1, 1, 1), {"x": dataclasses.replace(x, dtype=torch.complex64), "n": 1})),
        "unknown": error(dataclasses.replace(plain, constants={**plain.constants, "block": 1})),
        "pdl": error(_launch(launch_pdl=1)),
        "cpu": error(plain, Device("cpu", "x86_64", "a CPU")),
        "libcuda": str(cubin.missing() or ""),
    }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


# Triton, compiled --------------------------------------------------------------------------------------------------


def test_triton_artifact_carries_its_launch_facts(compiled: dict[str, Any]) -> None:
    facts = compiled["sm_90"]
    assert facts["symbol"] == "scale" and facts["block"] == [128, 1, 1] and facts["cluster"] == [1, 1, 1]
    kinds = [(p["kind"], p["name"]) for p in facts["parameters"]]
    # the absent weight is the constant None and no parameter; the two nameless ones are Triton's scratch
    run_time = [("pointer", "x"), ("pointer", "y"), ("i64", "n"), ("f32", "factor")]
    assert kinds == [*run_time, ("pointer", ""), ("pointer", "")]
    assert [p["name"] for p in compiled["weight"]["parameters"]][:3] == ["x", "weight", "y"]


def test_triton_cubin_has_registers_and_no_spills(compiled: dict[str, Any]) -> None:
    registers, spills, _ = compiled["sm_90"]["resources"]
    assert 8 <= registers <= 64 and spills == 0


def test_triton_cluster_is_a_launch_fact(compiled: dict[str, Any]) -> None:
    assert compiled["cluster"]["cluster"] == [2, 1, 1]


def test_triton_compiles_for_architectures_that_nobody_here_owns(compiled: dict[str, Any]) -> None:
    assert all(size > 1000 for size in compiled["others"].values())


def test_sizes_do_not_recompile_but_alignment_does(compiled: dict[str, Any]) -> None:
    """`n` is do_not_specialize: 1000 and 1008 (a multiple of 16) are one kernel; a misaligned x is another."""
    first, other_size, misaligned = compiled["keys"]
    assert first == other_size != misaligned


def test_same_named_triton_kernels_are_told_apart(compiled: dict[str, Any]) -> None:
    assert compiled["twins_differ"]


def test_triton_refusals_name_the_parameter(compiled: dict[str, Any]) -> None:
    assert "no value for ['weight', 'y', 'n', 'factor']" in compiled["absent"]
    assert "no parameter ['block']" in compiled["unknown"]
    assert "BLOCK is tl.constexpr" in compiled["constexpr"]
    assert "x has dtype torch.complex64" in compiled["dtype"]
    assert "launch_pdl" in compiled["pdl"]
    assert "not for a CPU" in compiled["cpu"]


def test_launch_path_is_told(compiled: dict[str, Any]) -> None:
    assert "triton" in compiled["path"]
    known = tw_triton._known_abi("3.6.0")
    assert known and not tw_triton._known_abi("3.60.0") and not tw_triton._known_abi("4.0.0")


# Triton, interpreted -----------------------------------------------------------------------------------------------


def _call(**tensors: TensorFacts | None) -> Call:
    return Call("scale", Device("cpu", "x86_64", "a CPU"), tensors, {}, outputs=("y",))


@pytest.mark.skipif(not tw_triton.interpreting(), reason="the interpreter is off in this process")
@pytest.mark.parametrize("weight", [False, True])
def test_interpreter_runs_launches_on_cpu_tensors(weight: bool) -> None:
    launch = _launch(weight=weight)
    backend = tw_triton.TritonBackend()
    assert backend.emulates(Device("cpu", "x86_64", "a CPU"))
    runner = backend.prepare([launch], _call(x=launch.args["x"], weight=launch.args["weight"], y=launch.args["y"]))
    x, w = torch.randn(1000).bfloat16(), torch.randint(1, 4, (1000,)).bfloat16()
    y = torch.full_like(x, torch.nan)
    runner([x, w if weight else None, y])
    torch.testing.assert_close(y.float(), x.float() * 3 * (w.float() if weight else 1), rtol=2**-7, atol=0)


@pytest.mark.skipif(not tw_triton.interpreting(), reason="the interpreter is off in this process")
def test_compiling_under_the_interpreter_is_refused() -> None:
    with pytest.raises(TypeError, match="TRITON_INTERPRET"):
        tw_triton.TritonBackend().compile(_launch(), H100)


# CUDA C++ ----------------------------------------------------------------------------------------------------------

ADD = """
#include "step.cuh"
extern "C" __global__ void add(const float* x, float* y, long long n, float factor) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * factor + STEP + OFFSET;
}
"""

has_compiler = pytest.mark.skipif(cuda.CudaBackend().missing() is not None, reason="neither NVRTC nor nvcc is here")


@pytest.fixture
def source(tmp_path: Path) -> cuda.Source:
    (tmp_path / "add.cu").write_text(ADD)
    (tmp_path / "step.cuh").write_text("#define STEP 1.0f\n")
    return cuda.Source(tmp_path / "add.cu", "add")


def _add(function: Any, n: int = 1000, **options: Any) -> Launch:
    x, y = TensorFacts.dense("x", (n,), torch.float32), TensorFacts.dense("y", (n,), torch.float32)
    grid = ((n + 127) // 128, 1, 1)
    return Launch(function, grid, {"x": x, "y": y, "n": n, "factor": 2.0}, {"OFFSET": 5}, {"block": 128, **options})


@has_compiler
@pytest.mark.parametrize("tool", ["nvrtc", "nvcc"])
def test_cuda_source_compiles_to_an_artifact(source: cuda.Source, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool == "nvrtc" and not nvrtc.nvrtc_file():
        pytest.skip("NVRTC is not here")
    if tool == "nvcc":
        if not nvrtc.nvcc():
            pytest.skip("nvcc is not here")
        monkeypatch.setattr(nvrtc, "nvrtc_file", lambda: "")
    assert cuda.compiler().startswith(tool)
    artifact = cuda.CudaBackend().compile(_add(source, shared=1024), H100)
    assert artifact.block == (128, 1, 1) and artifact.shared == 1024
    assert [p.kind for p in artifact.parameters] == ["pointer", "pointer", "i64", "f32"]
    registers, spills, _ = tw_triton.resources(artifact)
    assert registers > 0 and spills == 0


@has_compiler
def test_cuda_errors_show_the_compilers_log(source: cuda.Source) -> None:
    with pytest.raises(cuda.CompileError, match="nonsense"):
        cuda.compile_source('extern "C" __global__ void f() { nonsense; }', "sm_90", symbol="f")
    with pytest.raises(cuda.CompileError, match='no extern "C"'):
        cuda.compile_source('extern "C" __global__ void f() {}', "sm_90", symbol="g")
    with pytest.raises(TypeError, match="num_warps"):
        cuda.CudaBackend().compile(_add(source, num_warps=4), H100)
    with pytest.raises(ValueError, match="cluster"):
        cuda.CudaBackend().compile(_add(source, cluster=(3, 1, 1)), H100)


def test_digest_of_a_source_covers_what_it_includes(source: cuda.Source) -> None:
    before = source.digest()
    (source.path.parent / "step.cuh").write_text("#define STEP 2.0f\n")
    assert source.digest() != before


@has_compiler
def test_prebuilt_cubin_is_taken_as_it_is(source: cuda.Source, tmp_path: Path) -> None:
    made = cuda.CudaBackend().compile(_add(source), H100)
    (tmp_path / "add.cubin").write_bytes(made.image)
    taken = cuda.CudaBackend().compile(_add(cuda.Prebuilt(tmp_path / "add.cubin", "add")), H100)
    assert taken == made


# The launcher ------------------------------------------------------------------------------------------------------

HOST_DRIVER = """
#include <stdint.h>
#include <string.h>
typedef struct { uint32_t grid[3], block[3], shared; void *stream, *attributes; uint32_t count; } config_t;
typedef struct { uint32_t id, pad; uint32_t size[3]; } attribute_t;
static int fail;
void set_failure(int code) { fail = code; }
int launch(const config_t* c, void (*kernel)(const config_t*, void**), void** p, void** extra) {
    if (fail) { int code = fail; fail = 0; return code; }
    kernel(c, p);
    return 0;
}
/* adds n to *x after a pause in which other threads get to run */
void add(const config_t* c, void** p) {
    int64_t *x = *(int64_t**)p[0], n = *(int64_t*)p[1];
    volatile int spin = 0;
    for (int i = 0; i < 2000; i++) spin += i;
    x = *(int64_t**)p[0];
    *x += n;
}
/* a descriptor is told its address: word 0; the rest is as it was made */
int place(int64_t* map, void* address) {
    if (fail) { int code = fail; fail = 0; return code; }
    map[0] = (int64_t)address;
    return 0;
}
void described(const config_t* c, void** p) {
    int64_t *out = *(int64_t**)p[0], *x = p[1], *y = p[2];
    out[0] = x[0]; out[1] = x[1]; out[2] = y[0]; out[3] = y[1]; out[4] = ((intptr_t)x | (intptr_t)y) % 64;
}
void facts(const config_t* c, void** p) {
    int64_t* out = *(int64_t**)p[1];
    out[0] = *(int64_t*)p[0]; out[1] = (int64_t)*(float*)p[2]; out[2] = *(int32_t*)p[3]; out[3] = *(int64_t*)p[4];
    out[4] = c->grid[0]; out[5] = c->grid[2]; out[6] = c->block[0]; out[7] = c->shared; out[8] = (int64_t)c->stream;
    out[9] = c->count; out[10] = c->count ? ((attribute_t*)c->attributes)->id : 0;
    out[11] = c->count ? ((attribute_t*)c->attributes)->size[0] : 0;
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("host")
    (folder / "host.c").write_text(HOST_DRIVER)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "host.c", "-o", "host.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "host.so"))


def _function(host: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    return ctypes.cast(getattr(host, name), ctypes.c_void_p)


def _never(step: int, code: int, config: Any, params: Any) -> None:
    raise AssertionError(f"step {step} failed with {code}")


def test_parameters_arrive_where_the_kernel_reads_them(host: ctypes.CDLL) -> None:
    x, work = TensorFacts.dense("x", (1,), torch.int64), Scratch("work", (16,), torch.int64)
    launch = Launch(None, (7, 1, 9), {"n": -(2**40), "out": work, "f": 2.5, "flag": True, "none": None, "x": x})
    kinds = {"n": "i64", "out": "pointer", "f": "f32", "flag": "i32", "none": "pointer"}
    artifact = Artifact(
        b"", "facts", tuple(Parameter(k, n) for n, k in kinds.items()), (96, 1, 1), shared=123, cluster=(4, 1, 1)
    )
    step = enqueue.bind(artifact, launch, {"x": 0, "unused": 1, "work": 2})
    run = enqueue.enqueuer([step], [_function(host, "facts")], host.launch, lambda i: 1000 + i, _never, 5)
    out = torch.full((16,), -1, dtype=torch.int64)
    run([torch.zeros(1), None, out])
    assert out[:12].tolist() == [-(2**40), 2, 1, 0, 7, 9, 96, 123, 1005, 1, 4, 4]


def test_descriptors_are_made_once_and_told_each_address(host: ctypes.CDLL) -> None:
    x, y, out = (TensorFacts.dense(n, (4, 64), torch.bfloat16) for n in ("x", "y", "out"))
    maps = {f.name: TensorMap(f, (4, 64), (64, 1), (2, 64), 128) for f in (x, y)}
    made: list[str] = []

    def make(wanted: TensorMap) -> ctypes.Array[Any]:
        made.append(wanted.facts.name)
        room = (ctypes.c_uint64 * (2 * enqueue.MAP_WORDS))()
        words = (ctypes.c_uint64 * enqueue.MAP_WORDS).from_buffer(room, -ctypes.addressof(room) % 64)
        words[1] = len(made)
        return words

    def recover(code: int, map: Any, address: Any) -> None:
        if code != cubin.INVALID_CONTEXT:
            raise cubin.LaunchError("placing", code)
        assert host.place(map, address) == 0

    launch = Launch(None, (1, 1, 1), {"out": out, "x_map": maps["x"], "y_map": maps["y"]})
    parameters = (Parameter("pointer", "out"), Parameter("map", "x_map"), Parameter("map", "y_map"))
    step = enqueue.bind(Artifact(b"", "described", parameters, (1, 1, 1)), launch, {"x": 0, "y": 1, "out": 2})
    functions = [_function(host, "described")] * 2
    sources = enqueue.Maps(make, host.place, recover)
    run = enqueue.enqueuer([step, step], functions, host.launch, lambda i: 0, _never, 0, sources)
    assert made == ["x", "y"]
    for fails in (0, cubin.INVALID_CONTEXT):
        host.set_failure(fails)
        tensors = [torch.zeros(4, 64, dtype=torch.bfloat16) for _ in range(2)]
        found = torch.full((8,), -1, dtype=torch.int64)
        run([*tensors, found])
        assert found[:5].tolist() == [tensors[0].data_ptr(), 1, tensors[1].data_ptr(), 2, 0]
    assert made == ["x", "y"]
    host.set_failure(1)
    with pytest.raises(cubin.LaunchError, match="placing"):
        run([*tensors, found])
    with pytest.raises(TypeError, match="descriptors"):
        enqueue.enqueuer([step], functions[:1], host.launch, lambda i: 0, _never, 0)


def test_descriptors_that_the_driver_refuses_are_known_before_the_first_call(host: ctypes.CDLL) -> None:
    """While the plan is made another kernel may still be taken; a call has none to go to."""
    x = TensorFacts.dense("x", (4, 64), torch.bfloat16)
    launch = Launch(None, (1, 1, 1), {"x_map": TensorMap(x, (4, 64), (64, 1), (2, 64), 128)})
    step = enqueue.bind(Artifact(b"", "k", (Parameter("map", "x_map"),), (1, 1, 1)), launch, {"x": 0})

    def make(wanted: TensorMap) -> ctypes.Array[Any]:
        raise cubin.LaunchError("a descriptor", 1)

    with pytest.raises(cubin.LaunchError, match="a descriptor"):
        enqueue.enqueuer([step], [None], host.launch, lambda i: 0, _never, 0, enqueue.Maps(make, host.place, _never))


def test_threads_never_share_a_frame(host: ctypes.CDLL) -> None:
    """ctypes releases the GIL during a launch: a frame shared by two threads would send sums to the wrong tensor."""
    artifact = Artifact(b"", "add", (Parameter("pointer", "x"), Parameter("i64", "n")), (1, 1, 1))
    x = TensorFacts.dense("x", (1,), torch.int64)
    steps = [enqueue.bind(artifact, Launch(None, (1, 1, 1), {"x": x, "n": n}), {"x": 0}) for n in (3, 5)]
    run = enqueue.enqueuer(steps, [_function(host, "add")] * 2, host.launch, lambda i: 0, _never, 0)
    tensors = [torch.zeros(1, dtype=torch.int64) for _ in range(8)]

    def work(mine: torch.Tensor) -> None:
        for _ in range(2000):
            run([mine])

    threads = [threading.Thread(target=work, args=(t,)) for t in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [t.item() for t in tensors] == [16000] * 8


def test_a_failed_launch_reaches_the_recovery_with_its_step(host: ctypes.CDLL) -> None:
    artifact = Artifact(b"", "add", (Parameter("pointer", "x"), Parameter("i64", "n")), (1, 1, 1))
    x = TensorFacts.dense("x", (1,), torch.int64)
    step = enqueue.bind(artifact, Launch(None, (1, 1, 1), {"x": x, "n": 3}), {"x": 0})
    seen: list[tuple[int, int]] = []
    function = _function(host, "add")

    def again(step: int, code: int, config: Any, params: Any) -> None:
        seen.append((step, code))
        assert host.launch(config, function, params, None) == 0

    run = enqueue.enqueuer([step, step], [function] * 2, host.launch, lambda i: 0, again, 0)
    host.set_failure(cubin.INVALID_CONTEXT)
    tensor = torch.zeros(1, dtype=torch.int64)
    run([tensor])
    assert seen == [(0, 201)] and tensor.item() == 6


def test_wrong_arguments_are_refused_when_the_plan_is_made() -> None:
    x = TensorFacts.dense("x", (1,), torch.float32)

    def bind(kind: str, value: Any, grid: tuple[int, int, int] = (1, 1, 1)) -> None:
        enqueue.bind(Artifact(b"", "k", (Parameter(kind, "a"),), (1, 1, 1)), Launch(None, grid, {"a": value}), {"x": 0})

    described = TensorMap(x, (1, 1), (1, 1), (1, 1), 32)
    wrong = (
        ("i64", x),
        ("pointer", 3),
        ("i64", None),
        ("i32", 2**31),
        ("i64", 1.5),
        ("map", x),
        ("pointer", described),
    )
    for kind, value in wrong:
        with pytest.raises(TypeError, match="k: a"):
            bind(kind, value)
    with pytest.raises(ValueError, match="grid y = 65536"):
        bind("pointer", x, (1, 65536, 1))


def test_launch_errors_say_whether_the_context_survives() -> None:
    lost = cubin.LaunchError("launching f", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access")
    assert lost.sticky and "CUDA_ERROR_ILLEGAL_ADDRESS" in str(lost) and "context of this process is lost" in str(lost)
    kept = cubin.LaunchError("launching f", 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument", launched=1)
    assert not kept.sticky and kept.launched == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_the_reason_is_told(compiled: dict[str, Any]) -> None:
    assert "libcuda.so.1" in compiled["libcuda"] and "install the NVIDIA driver" in compiled["libcuda"]
    with pytest.raises(cubin.LaunchError, match=r"libcuda\.so\.1"):
        cubin.driver()


def test_scratch_is_shared_by_name_and_order() -> None:
    a, b = Scratch("a", (4,)), Scratch("b", (8,))
    launches = [Launch(None, (1, 1, 1), {"u": b, "v": 1}), Launch(None, (1, 1, 1), {"u": a, "v": b})]
    assert scratches(launches) == [b, a]
    with pytest.raises(ValueError, match="'a' is named twice"):
        scratches([*launches, Launch(None, (1, 1, 1), {"u": Scratch("a", (5,))})])


# On a GPU ----------------------------------------------------------------------------------------------------------


def _gpu_runner(kind: str, source: cuda.Source, n: int, **options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A runner that scales: y = 3 x by Triton, y = 2 x + 6 by CUDA."""
    dtype = torch.bfloat16 if kind == "triton" else torch.float32
    x, y = torch.randint(-8, 8, (n,), device="cuda").to(dtype), torch.full((n,), torch.nan, device="cuda", dtype=dtype)
    launch = _launch(n, **options) if kind == "triton" else _add(source, n, **options)
    facts = {name: launch.args.get(name) for name in ("x", "weight", "y")}
    call = Call("scale", device_of("cuda", 0), facts, {}, outputs=("y",))
    backend: Any = tw_triton.TritonBackend() if kind == "triton" else cuda.CudaBackend()
    return backend.prepare([launch], call), x, y


def _right(kind: str, x: torch.Tensor, y: torch.Tensor) -> bool:
    torch.cuda.synchronize()
    return torch.equal(y, x * 3 if kind == "triton" else x * 2 + 6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["triton", "cuda"])
@pytest.mark.parametrize("where", ["here", "stream", "thread", "graph"])
def test_gpu_kernels_run_on_the_current_stream_of_any_thread(kind: str, where: str, source: cuda.Source) -> None:
    runner, x, y = _gpu_runner(kind, source, 1000)
    assert isinstance(runner, cubin.CubinRunner)
    torch.cuda.synchronize()
    if where == "here":
        runner([x, None, y])
    elif where == "stream":
        with torch.cuda.stream(torch.cuda.Stream()):
            runner([x, None, y])
    elif where == "thread":  # a new thread has no current context yet
        thread = threading.Thread(target=lambda: runner([x, None, y]))
        thread.start()
        thread.join()
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runner([x, None, y])
        torch.cuda.synchronize()
        assert y.isnan().all()
        graph.replay()
    assert _right(kind, x, y)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "options"),
    [("cuda", {"shared": 100_000}), ("cuda", {"cluster": 2}), ("cuda", {"cluster": 8}), ("triton", {"num_ctas": 2})],
)
def test_gpu_launch_facts_take_effect(kind: str, options: dict[str, int], source: cuda.Source) -> None:
    runner, x, y = _gpu_runner(kind, source, 1024, **options)
    runner([x, None, y])
    assert _right(kind, x, y)


@pytest.mark.gpu
def test_gpu_kernel_that_cannot_be_loaded_says_why(source: cuda.Source) -> None:
    with pytest.raises(cubin.LaunchError, match="300000 bytes of dynamic") as caught:
        _gpu_runner("cuda", source, 8, shared=300_000)
    assert not caught.value.sticky
    launch = _add(source, 8)
    with pytest.raises(cubin.LaunchError, match=r"a descriptor of x \(4, 64\) for boxes"):  # rows of 2 bytes more
        x = TensorFacts.dense("x", (4, 65), torch.bfloat16)
        cubin.driver().tensor_map(TensorMap(x, (4, 64), (65, 1), (2, 64), 128))
    short = dataclasses.replace(cuda.CudaBackend().compile(launch, device_of("cuda", 0)), parameters=())
    with pytest.raises(cubin.LaunchError, match="takes parameters of"):
        cubin.CubinRunner([short], [launch], Call("add", device_of("cuda", 0), {}, {}))


if __name__ == "__main__":
    print(json.dumps(_compile_all()))
