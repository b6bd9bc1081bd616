"""Compiled kernels on disk: published atomically, checked when read, bounded in size. What is corrupt is a miss."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

MOST_BYTES = 512 << 20
DIGEST = 32


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


class Store:
    """Files by key. Every method bears a missing, read-only or full disk: the kernel is then compiled again."""

    def __init__(self, where: Path | None = None) -> None:
        self.where = where or folder()

    def _path(self, key: str) -> Path:
        return self.where / f"{key}.so"

    def path(self, key: str, build: Callable[[Path], None]) -> Path:
        """The file of a key; `build` writes it where it is not there. It ends in its own digest, which a loader of
        shared objects does not mind."""
        path = self._path(key)
        if self._sound(path):
            return path
        try:
            self.where.mkdir(parents=True, exist_ok=True)
            made = self._made(self.where, key, build)
            os.replace(made, path)
        except OSError:
            return self._made(Path(tempfile.mkdtemp(prefix="tilewright-")), key, build)
        self._trim(keep=path)
        return path

    @staticmethod
    def _made(where: Path, key: str, build: Callable[[Path], None]) -> Path:
        handle, name = tempfile.mkstemp(prefix=f".{key[:16]}-", suffix=".so", dir=where)
        os.close(handle)
        path = Path(name)
        try:
            build(path)
            with path.open("ab") as file:
                file.write(hashlib.sha256(path.read_bytes()).digest())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    @staticmethod
    def _sound(path: Path) -> bool:
        try:
            data = path.read_bytes()
        except OSError:
            return False
        return len(data) > DIGEST and hashlib.sha256(data[:-DIGEST]).digest() == data[-DIGEST:]

    def _trim(self, keep: Path) -> None:
        """Remove what was least lately written, beyond the most bytes."""
        found = []
        for path in self.where.glob("*.so"):
            try:
                status = path.stat()
            except OSError:
                continue
            found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= MOST_BYTES:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size
