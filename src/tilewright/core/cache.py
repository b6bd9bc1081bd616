"""The one cache directory: named entries of bytes, safe against crashes, races, strangers and full disks.

An entry is a file: one header line (format, sha256, length, the full key), then the payload. Writes go to a temporary
file and are renamed into place; whatever does not check is a miss. Nothing is unpickled. What the bytes mean is known
to those who store them (artifacts, evidence, times).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger("tilewright")
FORMAT = 1
LIMIT_BYTES = 2 << 30
"""Beyond this the artifacts used longest ago are dropped."""
KINDS = frozenset({"artifacts", "evidence", "times", "locks", "red", "tile"})
"""The folders that this library makes in its cache directory; `tile` is the tile compiler's own."""
LEFTOVER_SECONDS = 24 * 3600.0
"""No write and no build takes this long: older temporary files, and locks without an entry, belong to nobody."""


class Cache:
    """Entries by (kind, key). All methods are safe to call from many threads and processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._told = self._looked = False
        self._lock = threading.Lock()
        self.problem = ""
        """Why entries are not kept, for `doctor`; empty when all is well."""

    def load(self, kind: str, key: str) -> bytes | None:
        """The payload, or None: absent, truncated, corrupt, of another format or another key."""
        self._close_to_others()
        try:
            data = self._file(kind, key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._degrade(error)
            return None
        header, _, payload = data.partition(b"\n")
        try:
            facts = json.loads(header)
        except (ValueError, RecursionError):
            return None
        good = (
            isinstance(facts, dict)
            and facts.get("format") == FORMAT
            and facts.get("key") == key
            and facts.get("sha256") == hashlib.sha256(payload).hexdigest()
        )
        return payload if good else None

    def store(self, kind: str, key: str, payload: bytes) -> None:
        """Publish an entry atomically. A disk that does not take it costs one notice and nothing else."""
        header = {"format": FORMAT, "sha256": hashlib.sha256(payload).hexdigest(), "key": key}
        path = self._file(kind, key)
        try:
            self._folder(path.parent)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as out:
                    out.write(json.dumps(header).encode() + b"\n" + payload)
                os.replace(temporary, path)
            except BaseException:
                with_suppressed(os.unlink, temporary)
                raise
        except OSError as error:
            self._degrade(error)

    def update(self, kind: str, key: str, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Read-modify-write of a JSON object under a lock between processes; returns the new object."""
        with self.locked(kind, key):
            value = self.load_json(kind, key)
            change(value)
            self.store(kind, key, json.dumps(value, sort_keys=True).encode())
            return value

    def load_json(self, kind: str, key: str) -> dict[str, Any]:
        payload = self.load(kind, key)
        if payload is None:
            return {}
        try:
            value = json.loads(payload)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def touch(self, kind: str, key: str) -> None:
        """Mark an entry as used, so that `trim` drops it late."""
        with_suppressed(os.utime, self._file(kind, key))

    @contextmanager
    def locked(self, kind: str, key: str, timeout: float = 60.0) -> Iterator[None]:
        """A lock between processes; one that died releases it. Where none can be had, go on: entries are atomic."""
        import filelock  # here and below: half of what importing the library would cost

        path = self._file(kind, key).with_suffix(".lock")
        lock: filelock.BaseFileLock | None = None
        try:
            self._folder(path.parent)
            lock = filelock.FileLock(path)
            lock.acquire(timeout=timeout)
        except filelock.Timeout:
            log.warning("%s has been locked by another process for %.0f s: going on without the lock", path, timeout)
            lock = None
        except OSError as error:
            self._degrade(error)
            lock = None
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def entries(self) -> Iterator[Path]:
        return (p for p in self.root.glob("*/*.entry") if p.is_file())

    def health(self) -> tuple[int, int, int]:
        """(entries, bytes, entries that do not check)."""
        count = size = bad = 0
        for path in self.entries():
            count += 1
            size += path.stat().st_size
            header, _, payload = path.read_bytes().partition(b"\n")
            try:
                bad += json.loads(header).get("sha256") != hashlib.sha256(payload).hexdigest()
            except (ValueError, AttributeError, RecursionError):
                bad += 1
        return count, size, bad

    def drop(self, kind: str, unwanted: Callable[[str], bool]) -> None:
        """Drop the entries of `kind` whose keys are `unwanted`, those that do not check, and what killed processes left
        behind."""
        for path in self.root.glob(f"{kind}/*.entry"):
            try:
                with path.open("rb") as file:
                    header = json.loads(file.readline())
                if unwanted(str(header["key"])):
                    path.unlink()
            except (ValueError, KeyError, TypeError, RecursionError):
                with_suppressed(path.unlink)
            except OSError:
                continue
        self._sweep(kind)

    def _sweep(self, kind: str) -> None:
        """Temporary files and locks that belong to nobody."""
        old = time.time() - LEFTOVER_SECONDS
        for path in (*self.root.glob(f"{kind}/.new-*"), *self.root.glob(f"{kind}/*.lock")):
            try:
                if path.stat().st_mtime < old and not path.with_suffix(".entry").exists():
                    path.unlink()
            except OSError:
                continue

    def trim(self, kind: str = "artifacts", limit: int = LIMIT_BYTES) -> None:
        """Drop the entries of `kind` used longest ago until the rest fits, and what killed processes left behind."""
        self._sweep(kind)
        found = []
        for path in self.root.glob(f"{kind}/*.entry"):
            try:
                facts = path.stat()
            except OSError:
                continue
            found.append((facts.st_mtime, facts.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= limit:
                break
            with_suppressed(path.unlink)
            total -= size

    def _file(self, kind: str, key: str) -> Path:
        return self.root / kind / (hashlib.sha256(key.encode()).hexdigest()[:40] + ".entry")

    def _close_to_others(self) -> None:
        """Once: a directory that others may enter is closed to them if it is ours alone, and otherwise spoken of.

        What is loaded from it is run. A directory that holds anything else, or is sticky, is not touched: it may be a
        home, or everybody's /tmp in a fresh container.
        """
        with self._lock:
            looked, self._looked = self._looked, True
        if looked:
            return
        try:
            facts = self.root.stat()
        except OSError:
            return  # it will be made for the user alone, or whoever needs it will say what is wrong
        try:
            if facts.st_uid != os.geteuid():
                problem = f"belongs to user {facts.st_uid}"
            elif not facts.st_mode & 0o077:
                return
            elif not facts.st_mode & stat.S_ISVTX and {path.name for path in self.root.iterdir()} <= KINDS:
                self.root.chmod(0o700)
                return
            else:
                problem = f"has mode {stat.S_IMODE(facts.st_mode):o} and is not this cache's alone"
        except OSError as error:
            problem = f"cannot be closed to others ({error})"
        log.warning("cache directory %s %s: what is run from it may not be yours", self.root, problem)

    def _folder(self, folder: Path) -> None:
        self._close_to_others()
        if not folder.is_dir():
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)

    def _degrade(self, error: BaseException) -> None:
        with self._lock:
            told, self._told = self._told, True
            self.problem = str(error)
        if not told:
            log.warning("cache directory %s is not usable (%s): results last as long as this process", self.root, error)


def with_suppressed(action: Callable[..., object], *args: Any) -> None:
    """Do it; a file that is already gone or locked is no matter."""
    try:
        action(*args)
    except OSError:
        pass


@cache
def cache_directory() -> Path:
    """`TILEWRIGHT_CACHE_DIR`, else the platform's cache directory for the user."""
    chosen = os.environ.get("TILEWRIGHT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("tilewright"))


@cache
def disk() -> Cache:
    """The cache of this process."""
    return Cache(cache_directory())
