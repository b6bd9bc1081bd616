"""The cache directory: what survives truncation, strangers, full and read-only disks, races and killed processes."""

from __future__ import annotations

import json
import logging
import os
import resource
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilewright.core import artifacts
from tilewright.core import cache as module
from tilewright.core.backend import Artifact, Parameter
from tilewright.core.cache import Cache

HERE = Path(__file__).parent
NOBODY = 65534


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def entry(cache: Cache) -> Path:
    (found,) = cache.entries()
    return found


# Entries ----------------------------------------------------------------------------------------------------------


def test_what_is_stored_is_loaded(cache: Cache) -> None:
    for payload in (b"", b"\n", bytes(range(256)) * 100):
        cache.store("kind", "key", payload)
        assert cache.load("kind", "key") == payload
    assert cache.load("kind", "other") is None
    assert cache.load("other", "key") is None
    assert cache.health() == (1, entry(cache).stat().st_size, 0)


def test_every_truncation_is_a_miss(cache: Cache) -> None:
    cache.store("kind", "key", b"payload" * 20)
    whole = entry(cache).read_bytes()
    for length in range(len(whole)):
        entry(cache).write_bytes(whole[:length])
        assert cache.load("kind", "key") is None, length
    cache.store("kind", "key", b"again")
    assert cache.load("kind", "key") == b"again"


def test_every_flipped_byte_is_a_miss(cache: Cache) -> None:
    cache.store("kind", "key", b"payload")
    whole = bytearray(entry(cache).read_bytes())
    for place in range(len(whole)):
        whole[place] ^= 0x21
        entry(cache).write_bytes(whole)
        assert cache.load("kind", "key") is None, whole
        whole[place] ^= 0x21
    assert cache.health()[2] == 0 or cache.load("kind", "key") is None


def edited(change: Callable[[dict[str, object]], object]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        header, _, payload = data.partition(b"\n")
        facts = json.loads(header)
        change(facts)
        return json.dumps(facts).encode() + b"\n" + payload

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        edited(lambda facts: facts.update(format=module.FORMAT + 1)),
        edited(lambda facts: facts.update(key="another")),
        edited(lambda facts: facts.pop("sha256")),
        lambda data: b"[1, 2]\n" + data.partition(b"\n")[2],
        lambda data: b"\xff\xfe\n" + data.partition(b"\n")[2],
        lambda data: b"",
        lambda data: b"[" * 100_000 + b"\n",
        lambda data: data + b"more",
    ],
    ids=["format", "key", "no digest", "not an object", "not text", "empty", "deep", "longer"],
)
def test_foreign_entries_are_misses_and_are_replaced(cache: Cache, damage: Callable[[bytes], bytes]) -> None:
    cache.store("kind", "key", b"payload")
    entry(cache).write_bytes(damage(entry(cache).read_bytes()))
    assert cache.load("kind", "key") is None
    assert cache.load_json("kind", "key") == {}
    assert cache.update("kind", "key", lambda value: value.update(a=1)) == {"a": 1}
    assert cache.load_json("kind", "key") == {"a": 1}


def test_intact_entries_that_are_no_json_object_are_empty(cache: Cache) -> None:
    for payload in (b"[1]", b"not json", b"\xff"):
        cache.store("kind", "key", payload)
        assert cache.load_json("kind", "key") == {}


def test_folders_are_private(cache: Cache) -> None:
    before = os.umask(0)
    try:
        cache.store("kind", "key", b"payload")
    finally:
        os.umask(before)
    for folder in (cache.root, cache.root / "kind"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(cache).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o777])
@pytest.mark.parametrize("reads", [False, True])
def test_a_directory_that_is_open_to_others_is_closed(
    cache: Cache, mode: int, reads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cache.store("evidence", "key", b"payload")
    cache.root.chmod(mode)
    later = Cache(cache.root)
    assert later.load("evidence", "key") == b"payload" if reads else later.store("times", "key", b"") is None
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700
    assert not caplog.records


@pytest.mark.parametrize(("mode", "other"), [(0o755, "letters"), (0o1777, "")])
def test_a_directory_that_is_more_than_a_cache_is_left_alone_and_spoken_of_once(
    cache: Cache, mode: int, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as the empty /tmp of a fresh container, which is sticky."""
    (cache.root / other).mkdir(parents=True)
    cache.root.chmod(mode)
    for n in range(3):
        cache.store("evidence", f"key {n}", b"payload")
        assert cache.load("evidence", f"key {n}") == b"payload"
    assert stat.S_IMODE(cache.root.stat().st_mode) == mode
    (record,) = caplog.records
    assert f"has mode {mode:o} and is not this cache's alone" in record.message


def test_a_directory_of_another_user_is_spoken_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser can make one")
    cache = Cache(tmp_path / "cache")
    cache.store("evidence", "key", b"payload")
    os.chown(cache.root, NOBODY, NOBODY)
    later = Cache(cache.root)
    for _ in range(3):
        assert later.load("evidence", "key") == b"payload"
    (record,) = caplog.records
    assert f"belongs to user {NOBODY}" in record.message
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700


# Disks that do not take it ----------------------------------------------------------------------------------------


def uses(cache: Cache) -> None:
    cache.store("kind", "key", b"x" * 5000)
    assert cache.load("kind", "key") is None
    assert cache.update("kind", "json", lambda value: value.update(a=1)) == {"a": 1}
    with cache.locked("kind", "key"):
        pass
    cache.trim("kind", 0)
    assert list(cache.entries()) == [] or cache.health()[2] == 0


def test_a_place_that_cannot_be_a_folder_costs_one_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "tilewright"):
        uses(cache)
        uses(cache)
    assert len(caplog.records) == 1
    assert "not usable" in caplog.text
    assert cache.problem


def test_a_full_disk_costs_one_notice_and_leaves_nothing_half_written(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    """A file size limit fails in mid-write, as a full disk does."""
    cache.store("kind", "before", b"kept")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING, "tilewright"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            cache.store("kind", "key", b"x" * 5000)
            cache.store("kind", "key", b"x" * 5000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.records) == 1
    assert cache.load("kind", "key") is None
    assert cache.load("kind", "before") == b"kept"
    assert not list(cache.root.glob("kind/.new-*"))
    cache.store("kind", "key", b"x" * 5000)
    assert cache.load("kind", "key") == b"x" * 5000


@pytest.fixture
def common_user() -> Iterator[None]:
    """File modes do not stop the superuser, who runs tests in containers: be nobody for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.usefixtures("common_user")
def test_a_read_only_folder_still_serves_what_it_holds(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryDirectory(prefix="tilewright-tests-") as folder:
        cache = Cache(Path(folder) / "cache")
        cache.store("kind", "key", b"payload")
        cache.update("kind", "json", lambda value: value.update(a=1))
        for place in (cache.root / "kind", cache.root):
            place.chmod(0o500)
        try:
            with caplog.at_level(logging.WARNING, "tilewright"):
                cache.store("kind", "key", b"other")
                cache.store("another kind", "key", b"other")
                assert cache.update("kind", "json", lambda value: value.update(b=2)) == {"a": 1, "b": 2}
                cache.trim("kind", 0)
            assert cache.load("kind", "key") == b"payload"
            assert cache.load_json("kind", "json") == {"a": 1}
            assert len(caplog.records) == 1
        finally:
            for place in (cache.root, cache.root / "kind"):
                place.chmod(0o700)


# Size -------------------------------------------------------------------------------------------------------------


def test_unwanted_entries_are_dropped_and_so_is_what_cannot_be_read(cache: Cache) -> None:
    for key in ("old 1", "old 2", "new 1"):
        cache.store("kind", key, b"payload")
        cache.store("other", key, b"payload")
    (cache.root / "kind" / "broken.entry").write_bytes(b"no header")
    (cache.root / "kind" / "odd.entry").write_bytes(b"[]\n")
    (cache.root / "kind" / "deep.entry").write_bytes(b"[" * 100_000)
    cache.drop("kind", lambda key: key.startswith("old"))
    assert [cache.load("kind", key) for key in ("old 1", "old 2", "new 1")] == [None, None, b"payload"]
    assert all(cache.load("other", key) for key in ("old 1", "old 2", "new 1"))
    assert len(list(cache.root.glob("kind/*.entry"))) == 1


def test_trim_keeps_what_was_used_last(cache: Cache) -> None:
    for number in range(10):
        cache.store("kind", str(number), b"x" * 1000)
        os.utime(cache._file("kind", str(number)), (number, number))
    cache.touch("kind", "0")
    size = entry_size = next(cache.entries()).stat().st_size
    cache.trim("kind", 3 * entry_size + size // 2)
    assert [n for n in range(10) if cache.load("kind", str(n))] == [0, 8, 9]


def test_trim_removes_what_killed_processes_left(cache: Cache) -> None:
    with cache.locked("kind", "key"):
        cache.store("kind", "key", b"payload")
    kept = cache.root / "kind" / ".new-young"
    left = [cache.root / "kind" / name for name in (".new-old", "0123.lock")]
    for path in (kept, *left):
        path.touch()
    for path in left:
        os.utime(path, (1, 1))
    cache.trim("kind")
    assert kept.exists()
    assert not any(path.exists() for path in left)
    assert cache.load("kind", "key") == b"payload"


# Artifacts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_disk(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setattr(artifacts, "disk", lambda: cache)
    artifacts.forget()
    return cache


def artifact(number: int, size: int = 1000) -> Artifact:
    parameters = (Parameter("pointer", "x"), Parameter("i64", "rows"), Parameter("pointer"))
    return Artifact(
        bytes([number % 256, 10]) * (size // 2), f"kernel_{number}", parameters, (128, 1, 1), 1024, (2, 1, 1), 40, 0
    )


def never() -> Artifact:
    raise AssertionError("built although it was known")


def test_an_artifact_is_built_once(own_disk: Cache) -> None:
    made = artifacts.cached("key", lambda: artifact(1))
    assert made == artifact(1)
    assert artifacts.cached("key", never) is made
    artifacts.forget()
    assert artifacts.cached("key", never) == made


def test_a_damaged_artifact_is_built_again(own_disk: Cache) -> None:
    artifacts.cached("key", lambda: artifact(1))
    for payload in (b"", b"{}", b"{}\nimage", b"[]\nimage", artifacts.dump(artifact(1)) + b"more"):
        own_disk.store(artifacts.KIND, "key", payload)
        artifacts.forget()
        assert artifacts.cached("key", lambda: artifact(2)) == artifact(2)


def test_a_failed_build_leaves_nothing(own_disk: Cache) -> None:
    def fails() -> Artifact:
        raise ValueError("does not compile")

    with pytest.raises(ValueError, match="does not compile"):
        artifacts.cached("key", fails)
    assert artifacts.cached("key", lambda: artifact(1)) == artifact(1)


def test_a_thousand_compilations_stay_bounded(own_disk: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "MEMORY_BYTES", 100_000)
    monkeypatch.setattr(module, "LIMIT_BYTES", 200_000)
    monkeypatch.setattr(Cache.trim, "__defaults__", ("artifacts", 200_000))
    for number in range(1000):
        artifacts.cached(f"key {number}", lambda number=number: artifact(number, 2000))
    count, size = artifacts.remembered()
    assert count <= 50
    assert size <= 100_000
    assert own_disk.health()[1] <= 200_000 + artifacts.TRIM_EVERY * 3000
    assert artifacts.cached("key 999", never) == artifact(999, 2000)
    assert artifacts.cached("key 0", lambda: artifact(0, 2000)) == artifact(0, 2000)


def test_threads_build_an_artifact_once(own_disk: Cache) -> None:
    built: list[int] = []
    ready = threading.Barrier(4)

    def build() -> Artifact:
        built.append(1)
        return artifact(1)

    def ask() -> None:
        ready.wait()
        assert artifacts.cached("key", build) == artifact(1)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


# Many processes ---------------------------------------------------------------------------------------------------


def test_eight_processes_compile_and_tune_into_one_cache_while_some_are_killed(tmp_path: Path) -> None:
    folders = {"TILEWRIGHT_CACHE_DIR": str(tmp_path / "cache"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    environment = {**os.environ, **folders}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, str(HERE / "crowd.py"), str(tmp_path / "logs")],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["killed"] == 3, found
    assert found["survivors"] == 5, found
    assert found["bad_entries"] == 0, found
    assert found["lost"] == [], "updates that a process had confirmed are gone"
    # Whoever is killed while it builds leaves the build to the next; two never build the same.
    assert set(found["builds"].values()) == {1}, found
    assert found["keys"] == found["artifacts"], found
