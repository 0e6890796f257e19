"""The directory of a local store: its files, its lock, and who of its users is alive.

::

    DIR/hkv-meta      header, size classes of the chunks, index, access stamps, records
    DIR/hkv-arena     payloads
    DIR/hkv-lock      locked by whoever changes the meta file
    DIR/hkv-own/<id>  locked by the open store of that id for as long as it lives

Locks are the kernel's (flock): they end with their process however it dies, and no timeout declares a stopped
process dead that may wake up and write.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from hybridkv.errors import ConfigError, StoreError
from hybridkv.stores.local.geometry import HEADER_BYTES, Geometry, HeaderWord
from hybridkv.stores.local.index import Words
from hybridkv.units import format_bytes

META, ARENA, LOCK, OWN = "hkv-meta", "hkv-arena", "hkv-lock", "hkv-own"
_UNFINISHED = "hkv-meta.new"
_OURS = {META, ARENA, LOCK, OWN, _UNFINISHED}
_MIN_RECORD_SHARE = 128
"""A new store needs free space for records of this share of its capacity: enough for objects of 64 KiB."""

AtPoint = Callable[[str], object]
"""Called between the steps of a protocol with the step's name; tests end the process there."""


class StoreDirectory:
    """An open directory. Whoever changes the meta file holds ``locked()``.

    Args:
        path: the directory, created with its parents where it does not exist.
        capacity_bytes: as in ``LocalStore``.
        at_point: called at each step of creation.

    Attributes:
        path: as given.
        geometry: of the files.
        meta: words of the meta file.
        arena: bytes of the arena file.
        owner: the id of this open store.

    Raises:
        ConfigError: no capacity for a new store, or not that of the existing one.
        StoreError: the directory cannot be used; it is left as it was.
    """

    def __init__(self, path: Path, capacity_bytes: int | None, at_point: AtPoint) -> None:
        self.path = path
        self._thread_lock = threading.Lock()
        self._lock_fd = self._own_fd = self._meta_fd = -1
        try:
            wanted = _agreed(path, capacity_bytes)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (path / OWN).mkdir(mode=0o700, exist_ok=True)
            self._lock_fd = _open(path / LOCK, os.O_CREAT)
            with self.locked():
                if not (path / META).exists():
                    _create(path, wanted, at_point)
                self.geometry = _agreed(path, capacity_bytes)
                self._map()
                self._register_owner(at_point)
        except OSError as error:
            self.close()
            raise StoreError(f"local store {path}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def _map(self) -> None:
        for name, num_bytes in ((META, self.geometry.meta_bytes), (ARENA, self.geometry.arena_bytes)):
            held = (self.path / name).stat().st_size
            if held != num_bytes:
                raise StoreError(
                    f"local store {self.path}: {name} has {held} bytes instead of {num_bytes}; it was cut or "
                    f"replaced and is left as it is: restore it or remove the directory"
                )
        self._meta_fd = _open(self.path / META)
        self.meta: Words = np.frombuffer(mmap.mmap(self._meta_fd, self.geometry.meta_bytes), dtype="<u8")
        arena_fd = _open(self.path / ARENA)
        try:
            if os.fstat(arena_fd).st_blocks * 512 < self.geometry.arena_bytes:  # a copy with holes
                os.posix_fallocate(arena_fd, 0, self.geometry.arena_bytes)
            self.arena = np.frombuffer(mmap.mmap(arena_fd, self.geometry.arena_bytes), dtype=np.uint8)
        finally:
            os.close(arena_fd)

    def _register_owner(self, at_point: AtPoint) -> None:
        self.owner = int(self.meta[HeaderWord.LAST_OWNER]) + 1
        self.meta[HeaderWord.LAST_OWNER] = self.owner
        at_point("open: owner counted")
        self._own_fd = _open(self.path / OWN / str(self.owner), os.O_CREAT)
        at_point("open: owner file made")
        fcntl.flock(self._own_fd, fcntl.LOCK_EX)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock against all threads and processes; never while copying payloads."""
        with self._thread_lock:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def allocate_meta(self, offset: int, num_bytes: int) -> bool:
        """Give a range of the meta file its space; ``False`` where the file system has none left."""
        try:
            os.posix_fallocate(self._meta_fd, offset, num_bytes)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                return False
            raise StoreError(f"local store {self.path}: {error.strerror}") from error
        return True

    def owners(self) -> set[int]:
        """Return the ids of all other open stores, and of those whose process died."""
        names = os.listdir(self.path / OWN)  # noqa: PTH208 - names only
        return {int(name) for name in names if name.isdecimal()} - {self.owner}

    def is_dead(self, owner: int) -> bool:
        """Tell whether a store is open no more; the caller holds the lock."""
        try:
            fd = _open(self.path / OWN / str(owner))
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def forget_owner(self, owner: int) -> None:
        """Remove what a dead store left in the directory."""
        (self.path / OWN / str(owner)).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files; the mappings end with the last array that looks into them."""
        if self._own_fd >= 0:
            with suppress(OSError):
                self.forget_owner(self.owner)
        self.drop_files()

    def drop_files(self) -> None:
        """Close the files only: a forked child must not keep its parent's locks alive."""
        for fd in (self._own_fd, self._meta_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._own_fd = self._meta_fd = self._lock_fd = -1


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)


def _agreed(path: Path, capacity_bytes: int | None) -> Geometry:
    """Return the geometry that the directory has, or will have; changes nothing."""
    if (path / META).exists():
        with (path / META).open("rb") as file:
            held = Geometry.from_header(file.read(HEADER_BYTES), str(path / META))
        if capacity_bytes is None or Geometry.of(capacity_bytes) == held:
            return held
        raise ConfigError(
            f"local store {path} was made with capacity {held.capacity_bytes} bytes "
            f"({format_bytes(held.capacity_bytes)}), not {capacity_bytes} ({format_bytes(capacity_bytes)}); "
            f"open it with the capacity it has, give another directory, or remove this one and what it holds"
        )
    if capacity_bytes is None:
        raise ConfigError(
            f"local store {path} does not exist yet; give its capacity: local://{path}?capacity=64GiB"
        )
    if path.exists():
        foreign = sorted(set(os.listdir(path)) - _OURS)  # noqa: PTH208 - names only
        if foreign:
            raise StoreError(
                f"{path} holds {foreign[0]!r}, which is not of a local store; give an empty or new directory"
            )
    return Geometry.of(capacity_bytes)


def _create(path: Path, geometry: Geometry, at_point: AtPoint) -> None:
    """Make the files; the meta file gets its name last, so that an unfinished store does not exist."""
    needed = geometry.arena_bytes + geometry.stamps_offset + geometry.capacity_bytes // _MIN_RECORD_SHARE
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise ConfigError(_no_room(path, geometry, needed, free))
    try:
        _allocate(path / ARENA, geometry.arena_bytes)
        at_point("create: arena allocated")
        _allocate(path / _UNFINISHED, geometry.stamps_offset)
        os.truncate(path / _UNFINISHED, geometry.meta_bytes)
        with (path / _UNFINISHED).open("r+b") as file:
            file.write(geometry.to_header())
        at_point("create: meta written")
        (path / _UNFINISHED).rename(path / META)
        at_point("create: meta named")
    except OSError as error:
        for name in (ARENA, _UNFINISHED):
            (path / name).unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise ConfigError(_no_room(path, geometry, needed, free)) from error
        raise


def _allocate(path: Path, num_bytes: int) -> None:
    """Make a file whose space is really there: a hole in a full tmpfs would end the process later."""
    fd = _open(path, os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    finally:
        os.close(fd)


def _no_room(path: Path, geometry: Geometry, needed: int, free: int) -> str:
    remedy = "lower the capacity or free some space"
    if path.absolute().is_relative_to("/dev/shm"):  # noqa: S108 - where Docker's limit applies
        remedy += "; in a container raise the size of /dev/shm (docker run --shm-size)"
    return (
        f"local store {path}: capacity {format_bytes(geometry.capacity_bytes)} needs {needed} bytes "
        f"({format_bytes(needed)}) but {free} ({format_bytes(free)}) are free; {remedy}"
    )
