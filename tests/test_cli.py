"""The command line: what people type, what programs read, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tilewright as tw
from tilewright import cli
from tilewright.core import registry

ROOT = Path(__file__).parent.parent


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    code = cli.run(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def start(code: str, cache: Path) -> subprocess.Popen[str]:
    """A real process. Triton's interpreter is off: it is of no use here and decided a process at a time."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TILEWRIGHT_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_shape_that_an_op_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers between two and all were taken for leading dimensions: for a call that nobody meant."""
    for command in ("explain", "bench", "tune"):
        code, _, said = run(capsys, command, "attention", "--shape", "1x8x968x256")
        assert code != 0 and "4 sizes" in said and "Sq, Hq, Hkv, D, Dv: 7 sizes, as 1x8192x" in said
    code, _, said = run(capsys, "explain", "attention", "--shape", "0x256")
    assert code != 0 and "sizes of 1 and more" in said
    assert run(capsys, "explain", "attention", "--shape", "1x968x968x8x1x256x256")[0] == 0
    assert run(capsys, "explain", "rms_norm", "--shape", "2x3x4096")[0] == 0


def test_ops_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ops", "--json")
    assert code == 0
    found = json.loads(out)
    assert [op["op"] for op in found] == [op.name for op in registry.ops()]
    for op in found:
        assert list(op) == ["op", "family", "gradient", "in_place", "kernels"]
        for kernel in op["kernels"]:
            assert list(kernel) == ["kernel", "backend", "version", "available", "reasons"]
            assert kernel["available"] == (not kernel["reasons"])
            assert kernel["version"] or not kernel["available"]
        assert "reference" in {kernel["backend"] for kernel in op["kernels"]}


def test_ops_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "ops")
    assert code == 0
    assert all(op.name in out for op in registry.ops())


def test_version_and_help_in_the_runner() -> None:
    runner = CliRunner()
    assert runner.invoke(cli.app, ["--version"]).output.strip() == tw.__version__
    for command in ("ops", "explain", "verify", "bench", "tune", "doctor", "demo"):
        found = runner.invoke(cli.app, [command, "--help"])
        assert found.exit_code == 0, found.output
        assert "Usage" in found.output


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["explain", "nope"], ["nope", "rms_norm"]),
        (["verify", "nope"], ["nope", "rms_norm"]),
        (["bench", "nope"], ["nope", "rms_norm"]),
        (["tune", "nope"], ["nope", "rms_norm"]),
        (["bench", "rms_norm", "--backends", "nope"], ["nope", "vendor"]),
        (["bench", "rms_norm", "--workload", "nope"], ["nope", "pi0.5 encoder"]),
        (["bench", "rms_norm", "--shape", "8by8"], ["8by8", "8192x4096"]),
        (["bench", "rms_norm", "--dtype", "int8"], ["int8", "bfloat16"]),
        (["bench", "rms_norm", "--passes", "sideways"], ["sideways", "backward"]),
        (["explain", "rms_norm", "--device", "sm90"], ["sm90", "sm_90"]),
        (["explain", "rms_norm", "--option", "eps=small"], ["eps", "small", "float"]),
        (["explain", "rms_norm", "--option", "epsilon=1"], ["epsilon", "weight_offset"]),
        (["explain", "rms_norm", "--option", "eps=-1"], ["eps", "-1", "0 or more"]),
        (["explain", "rms_norm", "--without", "x"], ["x", "weight"]),
        (["verify", "rms_norm", "--size", "vast"], ["vast", "tiny, small, full"]),
        (["verify", "rms_norm", "--device", "toaster"], ["toaster", "cpu"]),
        (["bench", "rms_norm", "--device", "cuda:99"], ["cuda:99", "cpu"]),
        (["tune", "rms_norm", "--device", "cuda:99", "--shape", "4x64"], ["cuda:99", "cpu"]),
        (["explain", "l2_norm_backward", "--grad"], ["l2_norm_backward", "no gradient"]),
    ],
)
def test_a_mistake_is_one_message_that_names_what_would_do(
    words: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for name in names:
        assert name in err


def test_unknown_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bench", "--no-such-option")
    assert (code, out) == (2, "")


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_explain_for_a_machine_that_is_not_here(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "rms_norm", "--device", arch, "--shape", "8192x4096", "--grad")
    assert code == 0
    assert arch in out and "bf16[8192, 4096]" in out and "chosen:" in out
    for kernel in registry.kernels_of("rms_norm"):
        assert kernel.backend in out


def test_explain_as_json_with_options(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "explain", "rms_norm", "--device", "cpu", "--shape", "4x64", "--dtype", "float32",
        "--option", "weight_offset=1.0", "--option", "cast_before_weight=true", "--json",
    )  # fmt: skip
    assert code == 0
    found = json.loads(out)
    vendor = next(c for c in found["candidates"] if c["backend"].startswith("vendor"))
    assert not vendor["fits"] and "weight_offset" in " ".join(vendor["reasons"])
    assert found["op"] == "rms_norm" and found["chosen"] in [c["kernel"] for c in found["candidates"]]
    assert vendor["kernel"] == "rms_norm/vendor/aten"


def test_explain_takes_the_first_workload_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Not rows by columns alone, which say nothing of heads: once `attention` had 8192 batches of 40 queries."""
    code, out, _ = run(capsys, "explain", "attention", "--device", "sm_90")
    assert code == 0 and "q bf16[1, 8192, 32, 128], k bf16[1, 8192, 8, 128]" in out
    code, out, _ = run(capsys, "explain", "bce_with_logits", "--device", "sm_90")
    assert code == 0 and "logits fp32[4096, 4096]" in out
    code, out, _ = run(capsys, "explain", "bce_with_logits", "--device", "sm_90", "--dtype", "bf16")
    assert code == 0 and "logits bf16[4096, 4096]" in out
    code, out, _ = run(capsys, "explain", "top_k_top_p_sample", "--device", "sm_90", "--option", "top_p=1.0", "--json")
    assert code == 0 and json.loads(out)["candidates"]


def test_every_op_explains_its_default_call(capsys: pytest.CaptureFixture[str]) -> None:
    for op in registry.ops():
        code, out, err = run(capsys, "explain", op.name, "--shape", "16x256", "--device", "sm_90")
        assert code == 0, err
        assert "chosen:" in out


def test_bench_prints_nothing_but_json(tmp_path: Path) -> None:
    """A real process, in which something else prints to the same standard output, below Python too."""
    code = (
        "import os, sys\n"
        "from tilewright import cli\n"
        "from tilewright.ops.norm import vendor\n"
        "plain = vendor.rms_norm\n"
        "def chatty(*args, **options):\n"
        "    print('chatter')\n"
        "    os.write(1, b'low chatter')\n"
        "    return plain(*args, **options)\n"
        "vendor.rms_norm = chatty\n"
        "sys.argv = 'tilewright bench rms_norm --shape 8x64 --dtype float32 --backends reference,vendor"
        " --passes forward --json'.split()\n"
        "cli.main()\n"
    )
    process = start(code, tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert {row["backend"] for row in found["results"]} == {"reference", "vendor"}
    assert all(row["kernel_us"] > 0 and row["shape"] == [8, 64] for row in found["results"])
    assert "low chatter" in err


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 0
    found = json.loads(out)
    assert [b["name"] for b in found["backends"]] == registry.backend_names()
    assert all(b["available"] or b["remedy"] for b in found["backends"])
    assert found["cache"]["corrupt"] == 0 and found["torch"] == torch.__version__
    assert found["triton_launch"]


def test_doctor_cuts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a file, whatever is said of a backend stands on one line."""
    monkeypatch.setenv("COLUMNS", "80")
    facts = json.loads(run(capsys, "doctor", "--json")[1])["backends"]
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "\N{HORIZONTAL ELLIPSIS}" not in out
    for backend in facts:
        words = backend["name"], backend["version"], " ".join(backend["targets"])
        assert any(line.startswith(words[0]) and all(word in line for word in words) for line in out.splitlines())


def test_explain_names_one_architecture_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "attention", "--device", "sm_80", "--shape", "1x256")
    assert code == 0
    (hopper,) = [line for line in out.splitlines() if "hopper" in line]
    assert hopper.endswith("needs sm_90"), hopper


def test_doctor_tells_of_corrupt_entries_and_times_of_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilewright.core import cache

    elsewhere = cache.Cache(tmp_path)
    elsewhere.store("times", "rms_norm some class", json.dumps({"Another GPU|580.1": {}}).encode())
    elsewhere.store("artifacts", "a", b"payload")
    entry = next(tmp_path.glob("artifacts/*.entry"))
    entry.write_bytes(entry.read_bytes()[:-1])
    monkeypatch.setattr(cache, "disk", lambda: elsewhere)
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "1 entries do not check" in out
    assert "tuned classes: 1, 1 of them on another device or driver" in out


def test_verify_exits_1_and_names_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    from tilewright.core.kernel import Kernel

    kernel = Kernel("l2_norm", "vendor", f"{__name__}:wrong_scale", label="wrong", origin="test")
    registry.add_kernels([kernel])
    try:
        words = ("verify", "l2_norm", "--backends", "vendor", "--dtype", "fp32", "--size", "tiny", "--json")
        code, out, along = run(capsys, *words)
        said = [run(capsys, "explain", "l2_norm", "--dtype", "fp32", "--shape", s)[1] for s in ("1x1", "4x8192")]
    finally:
        registry.remove_kernel(kernel)
    found = json.loads(out)
    assert code == 1
    assert found["results"][0]["failed"] > 0
    assert {"op", "backend", "dtype", "cases", "passed", "failed", "not_run", "max_error", "tolerance"} <= set(
        found["results"][0]
    )
    assert re.search(r"^l2_norm/vendor/wrong float32: 0 of \d+ passed$", along, re.MULTILINE), along
    case = re.escape(found["results"][0]["failures"][0]["case"]) + r": y: largest error .*; reproduce with \S+\.py"
    here, elsewhere = (next(line for line in text.splitlines() if "vendor/wrong" in line) for text in said)
    assert re.search(f"quarantine: wrong result, {case}; \\S+$", here)
    assert re.search(f"no evidence yet: checked on first use; elsewhere wrong: {case}", elsewhere)


def test_verify_says_why_cases_were_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("verify", "linear", "--backends", "vendor,triton", "--dtype", "fp32", "--size", "tiny", "--device", "cpu")
    code, text, _ = run(capsys, *words, "--json")
    assert code == 0
    results = json.loads(text)["results"]
    entries = [entry for result in results for entry in result["not_run"]]
    code, text, _ = run(capsys, *words)
    assert code == 0
    table, _, below = text.partition("\nnot run")
    assert all(result["kernel"].partition("/")[2] in table for result in results)
    lines = [line.split(maxsplit=1) for line in below.splitlines()[2:]]
    assert sum(int(count) for count, _ in lines) == len(entries), "every case, once"
    assert len(lines) < len({entry["reason"] for entry in entries}) < len(entries)
    counts = [int(count) for count, _ in lines]
    assert counts == sorted(counts, reverse=True)
    acts = [rest for _, rest in lines if rest.startswith("act: ") and "linear/vendor/aten" in rest]
    assert len(acts) == 1, "values alone do not tell reasons apart"
    assert re.match(r"act: '(\w+)'; aten's epilogues .* linear/vendor/aten +float32 options .* act=\1", acts[0])


def wrong_scale(x: torch.Tensor, *, eps: float, saving: bool) -> list[Any]:
    found = tw.l2_norm.define({"x": x}, {"eps": eps}, saving)
    return [found[0] * 1.25, *found[1:]]


def test_interrupt_ends_with_130_and_leaves_no_half_written_file(tmp_path: Path) -> None:
    code = (
        "import signal, sys\n"
        "from tilewright import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job inherits that it is ignored
        "print('ready', file=sys.stderr, flush=True)\n"
        "sys.argv = 'tilewright verify --backends vendor --json'.split()\n"
        "cli.main()\n"
    )
    process = start(code, tmp_path)
    assert process.stderr is not None
    assert process.stderr.readline().strip() == "ready"
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert not list(tmp_path.rglob(".new-*"))


def test_explain_says_what_the_tile_compiler_makes_of_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("explain", "rms_norm", "--device", "cpu", "--shape", "4x64", "--backend", "tile")
    _, short, _ = run(capsys, *words)
    code, out, _ = run(capsys, *words, "--compiled")
    assert code == 0 and out.startswith(short.rstrip())
    assert "loop" not in short and re.search(r"loop +over \[<=\d+\]: sum \(tile.py:\d+\)", out)
    _, facts, _ = run(capsys, *words, "--compiled", "--json")
    (said,) = json.loads(facts)["compiled"].items()
    assert said[0] == "rms_norm/tile" and said[1] in out
    _, there, _ = run(capsys, "explain", "rms_norm", "--device", "sm_90", "--backend", "tile", "--compiled")
    assert "threads       " in there and "us for 8192 instances on an NVIDIA H200, limited by bytes" in there


@pytest.mark.parametrize(
    ("words", "why"),
    [(("linear", "--device", "cpu"), "has no kernel of linear"),
     (("rms_norm", "--device", "gfx942"), "does not take this call")],
)  # fmt: skip
def test_explain_says_that_no_compiler_said_anything(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    note = f"--compiled: tile's compiler alone says what it makes of a kernel, and tile {why}"
    _, out, _ = run(capsys, "explain", *words, "--compiled")
    assert out.rstrip().endswith(f"note: {note}")
    _, facts, _ = run(capsys, "explain", *words, "--compiled", "--json")
    assert json.loads(facts)["compiled"] == {} and note in json.loads(facts)["notes"]
    assert "--compiled" not in run(capsys, "explain", *words)[1]


def test_a_long_cell_of_a_piped_table_is_neither_cut_nor_what_others_are_padded_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rich.table import Table

    from tilewright.cli import output

    long, wide = "reason " * 60 + "end", "w" * 150
    table = Table("why", "kernel", title="not run", box=None)
    table.add_column("cases", justify="right")
    for row in ((long, "a", "1"), ("short", wide, "22"), ("[red]b[/red]", "c", "333"), ("two\nlines", "d", "4")):
        table.add_row(*row)
    output.stdout().print(table)
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == "not run" and head.split() == ["why", "kernel", "cases"]
    assert lines[0].split() == [*long.split(), "a", "1"]
    assert lines[1].split() == ["short", wide, "22"] and lines[2].split() == ["b", "c", "333"]
    assert lines[3].split() == ["two", "lines", "d", "4"]
    assert lines[1].index(wide) == lines[2].index("c") and len(lines[2]) <= output.PADDED
    assert not any(line.endswith(" ") for line in (head, *lines))
