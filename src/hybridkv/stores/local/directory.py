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
        self._lock_fd = self._own_fd = self._own_dir_fd = self._meta_fd = -1
        self._unmap()
        try:
            wanted = _agreed(path, capacity_bytes)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (path / OWN).mkdir(mode=0o700, exist_ok=True)
            self._own_dir_fd = os.open(path / OWN, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._lock_fd = _open(path / LOCK, os.O_CREAT)
            with self.locked():
                if not (path / META).exists():
                    _create(path, wanted, at_point)
                self.geometry = _agreed(path, capacity_bytes)
                self._map()
                self._register_owner(at_point)
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        except BaseException:
            self.close()
            raise

    def _unmap(self) -> None:
        self.meta: Words = np.zeros(0, dtype="<u8")
        self.arena = np.zeros(0, dtype=np.uint8)

    def _map(self) -> None:
        for name, num_bytes in ((META, self.geometry.meta_bytes), (ARENA, self.geometry.arena_bytes)):
            held = (self.path / name).stat().st_size
            if held != num_bytes:
                raise StoreError(
                    f"local store {self.path}: {name} has {held} bytes instead of {num_bytes}; it was cut or "
                    f"replaced and is left as it is: restore it or remove the directory"
                )
        self._meta_fd = _open(self.path / META)
        self.meta = np.frombuffer(mmap.mmap(self._meta_fd, self.geometry.meta_bytes), dtype="<u8")
        arena_fd = _open(self.path / ARENA)
        try:
            if os.fstat(arena_fd).st_blocks * 512 < self.geometry.arena_bytes:  # a copy with holes
                os.posix_fallocate(arena_fd, 0, self.geometry.arena_bytes)
            self.arena = np.frombuffer(mmap.mmap(arena_fd, self.geometry.arena_bytes), dtype=np.uint8)
        finally:
            os.close(arena_fd)

    def _register_owner(self, at_point: AtPoint) -> None:
        while self._own_fd < 0:
            self.owner = int(self.meta[HeaderWord.LAST_OWNER]) + 1
            self.meta[HeaderWord.LAST_OWNER] = self.owner
            at_point("open: owner counted")
            # A file of this id is there only if the meta file is new or damaged: somebody else's, so go on.
            with suppress(FileExistsError):
                self._own_fd = self._open_own(self.owner, os.O_CREAT | os.O_EXCL)
        at_point("open: owner file made")
        fcntl.flock(self._own_fd, fcntl.LOCK_EX)

    def _open_own(self, owner: int, flags: int = 0) -> int:
        """Open the file of an id in the directory that was opened, whatever its path leads to by now."""
        return _open(str(owner), flags, dir_fd=self._own_dir_fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock against all threads and processes; never while copying payloads.

        Raises:
            StoreError: the operating system refused something, or a file of locks was removed: then nobody
                knows who is alive.
        """
        with self._thread_lock:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
                if not all(os.fstat(fd).st_nlink for fd in (self._lock_fd, self._own_fd) if fd >= 0):
                    raise StoreError(
                        f"local store {self.path} was removed or replaced while it was open; open it anew"
                    )
                yield
            except OSError as error:
                raise self._failed(error) from error
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(f"local store {self.path}: {error.strerror or error}")

    def allocate_meta(self, offset: int, num_bytes: int) -> bool:
        """Give a range of the meta file its space; ``False`` where the file system has none left."""
        try:
            os.posix_fallocate(self._meta_fd, offset, num_bytes)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                return False
            raise
        return True

    def meta_space(self) -> int:
        """Return the bytes of the meta file that have their space."""
        return os.fstat(self._meta_fd).st_blocks * 512

    def owners(self) -> set[int]:
        """Return the ids of all other open stores, and of those whose process died."""
        names = os.listdir(self._own_dir_fd)  # noqa: PTH208 - names only
        return {int(name) for name in names if name.isdecimal()} - {self.owner}

    def is_dead(self, owner: int) -> bool:
        """Tell whether a store is open no more; the caller holds the lock."""
        try:
            fd = self._open_own(owner)
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
        with suppress(FileNotFoundError):
            os.unlink(str(owner), dir_fd=self._own_dir_fd)

    def close(self) -> None:
        """Close the files; the mappings end with the last array that looks into them."""
        if self._own_fd >= 0:
            with suppress(OSError):
                self.forget_owner(self.owner)
        self.drop_files()
        self._unmap()

    def drop_files(self) -> None:
        """Close the files only: a forked child must not keep its parent's locks alive."""
        for fd in (self._own_fd, self._own_dir_fd, self._meta_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._own_fd = self._own_dir_fd = self._meta_fd = self._lock_fd = -1


def _open(path: Path | str, flags: int = 0, dir_fd: int | None = None) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600, dir_fd=dir_fd)


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
    _remove_unfinished(path)
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
        _remove_unfinished(path)
        if error.errno == errno.ENOSPC:
            raise ConfigError(_no_room(path, geometry, needed, free)) from error
        raise


def _remove_unfinished(path: Path) -> None:
    """Free the space of files without a meta file; who still maps them keeps them as they are."""
    for name in (ARENA, _UNFINISHED):
        (path / name).unlink(missing_ok=True)


def _allocate(path: Path, num_bytes: int) -> None:
    """Make a file whose space is really there: a hole in a full tmpfs would end the process later."""
    fd = _open(path, os.O_CREAT | os.O_EXCL)
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
