"""The suite's own proof: each planted fault must turn it red, and the same kernel without a fault green."""

import pytest
import torch

import planted
from tilewright.core import registry
from tilewright.core.launch import Config
from tilewright.verify.suite import Result, verify_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def run(kernel, device, dtypes=DTYPES) -> list[Result]:
    op = registry.op(kernel.op)
    size = "tiny" if device == "cpu" else "small"
    return [verify_kernel(op, kernel, dtype, torch.device(device), size=size, stop_at_failure=True) for dtype in dtypes]


@pytest.mark.parametrize("fault", planted.TRITON_FAULTS)
def test_a_faulty_triton_kernel_is_caught(fault, device):
    dtype = torch.bfloat16 if fault == "int32 offset" else torch.float16
    results = run(planted.triton_kernel(fault), device, [dtype])
    assert any(r.failed for r in results), f"{fault} was not caught"


@pytest.mark.parametrize("fault", planted.FUNCTION_FAULTS)
def test_a_faulty_function_is_caught(fault, device):
    results = run(planted.function_kernel(fault), device)
    assert any(r.failed for r in results), f"{fault} was not caught"


def test_the_same_kernel_without_a_fault_passes(device):
    for result in run(planted.triton_kernel("none"), device, DTYPES[:2]):
        assert not result.failed, result.failures
        assert result.passed > 20


def test_a_red_case_writes_a_script_that_reproduces_it(device, tmp_path):
    import pathlib
    import subprocess
    import sys

    kernel = planted.function_kernel("gradient missing a term")
    result = run(kernel, device, DTYPES[2:])[0]
    script = pathlib.Path(result.failures[0]["script"])
    text = script.read_text()
    assert len(text.splitlines()) <= 20
    # the kernel is not a registered one: the script must say so by failing to find it, not by passing
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "StopIteration" in done.stderr
    # registered, it reproduces
    setup = f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); import tilewright, planted\n"
    setup += "from tilewright.core import registry\n"
    setup += "registry.add_kernels([planted.function_kernel('gradient missing a term')])\n"
    done = subprocess.run([sys.executable, "-c", setup + text], capture_output=True, text=True)
    assert "largest error" in done.stdout, done.stderr


def test_a_script_of_an_interpreted_kernel_reproduces_it():
    """Also where the shell that it is started from says nothing of the interpreter."""
    import os
    import pathlib
    import subprocess
    import sys

    if torch.cuda.is_available():
        pytest.skip("Triton compiles here")
    kernel = planted.triton_kernel("last column dropped")
    script = pathlib.Path(run(kernel, "cpu", DTYPES[2:])[0].failures[0]["script"])
    text = script.read_text()
    assert len(text.splitlines()) <= 20
    assert "emulated=True" in text
    first, environment, rest = text.partition("import os; os.environ.update({'TRITON_INTERPRET': '1'})\n")
    assert environment, text
    setup = f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); import tilewright, planted\n"
    setup += "from tilewright.core import registry\n"
    setup += "registry.add_kernels([planted.triton_kernel('last column dropped')])\n"
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = first + environment + setup + rest
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain)
    assert "largest error" in done.stdout, done.stderr


def test_scripts_of_other_sources_of_the_kernel_go(device, tmp_path, monkeypatch):
    from tilewright.verify import script
    from tilewright.verify.cases import Case

    monkeypatch.setattr(script, "cache_directory", lambda: tmp_path)
    kernel, other = planted.function_kernel("nondeterministic"), planted.function_kernel("input changed")
    case = Case("width", "rms_norm", (2,), 8, torch.float32)
    where = torch.device(device)
    first = [script.write_script(k, Config(), case, ["wrong"], where) for k in (kernel, other)]
    second = script.write_script(kernel, Config(), case, ["wrong otherwise"], where)
    assert set(map(str, (tmp_path / "red").iterdir())) == {*first, second}
    newer = planted.function_kernel("nondeterministic")
    newer.__dict__["digest"] = "0123456789abcdef"
    third = script.write_script(newer, Config(), case, ["wrong"], where)
    assert set(map(str, (tmp_path / "red").iterdir())) == {first[1], third}
