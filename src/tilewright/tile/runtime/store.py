"""Compiled kernels on disk: published atomically, checked when read, bounded in size. What is corrupt is a miss."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from tilewright.tile.errors import CompilerError

log = logging.getLogger("tilewright")
MOST_BYTES = 512 << 20
DIGEST = 32
LEFTOVER_SECONDS = 24 * 3600.0
"""No compilation takes this long: older temporary files belong to nobody."""


def folder() -> Path:
    """Where kernels are kept: beside the library's own caches."""
    base = os.environ.get("TILEWRIGHT_CACHE_DIR")
    root = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewright"
    return root / "tile"


@cache
def compiler_digest() -> str:
    """Digest of the sources of this compiler, so that an edited emitter meets no stale kernel."""
    text = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        text.update(path.read_bytes())
    return text.hexdigest()


@cache
def _closed(where: Path) -> bool:
    """Whether nobody else may write to a folder, which holds what this process will run. One of ours that others may
    enter is closed to them; what cannot be is said once, and not used."""
    facts = where.stat()
    if facts.st_uid == 0 != os.geteuid() and not facts.st_mode & 0o022:
        return True  # an administrator's, to read from
    problem = "" if facts.st_uid == os.geteuid() else f"belongs to user {facts.st_uid}"
    if not problem and facts.st_mode & 0o077:
        where.chmod(0o700)
        mode = stat.S_IMODE(where.stat().st_mode)
        problem = f"keeps mode {mode:o}" if mode & 0o077 else ""
    if problem:
        log.warning("%s %s: kernels are compiled again in each process", where, problem)
    return not problem


class Store:
    """Files by key. It bears a missing, read-only or full disk, and somebody else's folder: the kernel is then compiled
    again."""

    def __init__(self, where: Path | None = None) -> None:
        self.where = where or folder()

    @contextmanager
    def file(self, key: str, build: Callable[[Path], None]) -> Iterator[Path]:
        """The file of a key, to be loaded; `build` writes it where it is not there. It ends in its own digest, which a
        loader of shared objects does not mind. What cannot be kept is gone afterwards."""
        with ExitStack() as apart:
            path = self._kept(key, build)
            if path is None:
                where = tempfile.TemporaryDirectory(prefix="tilewright-", ignore_cleanup_errors=True)
                path = self._made(Path(apart.enter_context(where)), key, build)
            yield path

    def _kept(self, key: str, build: Callable[[Path], None]) -> Path | None:
        """The file in the folder; None where that cannot be used."""
        path = self.where / f"{key}.so"
        try:
            self.where.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.where.mkdir(exist_ok=True, mode=0o700)
            if not _closed(self.where):
                return None
            if not self._sound(path):
                os.replace(self._made(self.where, key, build), path)
                self._trim(keep=path)
        except OSError:
            return None
        return path

    @staticmethod
    def _made(where: Path, key: str, build: Callable[[Path], None]) -> Path:
        handle, name = tempfile.mkstemp(prefix=f".{key[:16]}-", suffix=".so", dir=where)
        os.close(handle)
        path = Path(name)
        try:
            build(path)
            data = path.read_bytes()
            if not data:
                raise CompilerError("the compiler said that all is well, and wrote nothing")
            with path.open("ab") as file:
                file.write(hashlib.sha256(data).digest())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    @staticmethod
    def _sound(path: Path) -> bool:
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (0, os.geteuid()):
                return False  # put there by somebody else before the folder was closed
            data = path.read_bytes()
        except OSError:
            return False
        return len(data) > DIGEST and hashlib.sha256(data[:-DIGEST]).digest() == data[-DIGEST:]

    def _trim(self, keep: Path) -> None:
        """Remove what was least lately written, beyond the most bytes, and what killed processes left behind."""
        old, found = time.time() - LEFTOVER_SECONDS, []
        for path in self.where.glob("*.so"):
            with suppress(OSError):
                status = path.stat()
                if path.name.startswith(".") and status.st_mtime < old:
                    path.unlink()
                else:
                    found.append((status.st_mtime, status.st_size, path))
        total = 0
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > MOST_BYTES and path != keep:
                path.unlink(missing_ok=True)
