"""What a local store makes of directories, disks and clocks that are not as they should be."""

import errno
import gc
import multiprocessing
import os
import shutil
import stat
import struct
from pathlib import Path

import pytest

from hybridkv.errors import ConfigError, StoreClosedError, StoreError
from hybridkv.stores.base import ChecksItself, GetResult, ListsObjects, PutResult, ReportsStats, Store
from hybridkv.stores.local import directory
from hybridkv.stores.local.geometry import Geometry, HeaderWord
from hybridkv.stores.local.store import LocalStore
from hybridkv.stores.registry import open_store
from hybridkv.testing.stores import Workbench, payload

SLOT = 4096
CAPACITY_BYTES = 64 * SLOT


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def bench(path):
    bench = Workbench(LocalStore(path, CAPACITY_BYTES), 80 * SLOT)
    yield bench
    bench.store.close()


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def assert_refused_untouched(path: Path, error: type[Exception], message: str, capacity_bytes=CAPACITY_BYTES):
    before = files(path)
    with pytest.raises(error, match=message):
        LocalStore(path, capacity_bytes)
    assert files(path) == before


# --- what is refused, and left as it is --------------------------------------------------------------------


def test_a_new_directory_needs_a_capacity_and_an_old_one_has_it(path):
    with pytest.raises(ConfigError, match=r"does not exist yet; give its capacity: local://.*\?capacity="):
        open_store(f"local://{path}")
    open_store(f"local://{path}?capacity=256KiB").close()
    store = open_store(f"local://{path}")
    assert store.stats().capacity_bytes == CAPACITY_BYTES
    assert all(isinstance(store, kind) for kind in (Store, ListsObjects, ReportsStats, ChecksItself))


@pytest.mark.parametrize(
    "uri",
    [
        "local://?capacity=1GiB",
        "local:///?capacity=1GiB",
        "local:///a%00b?capacity=1GiB",
        "local://host/x?capacity=1GiB",
    ],
)
def test_a_uri_without_an_absolute_path_is_a_config_error(uri):
    with pytest.raises(ConfigError, match="three slashes"):
        open_store(uri)


@pytest.mark.parametrize("capacity_bytes", [0, SLOT - 1, 2**50])
def test_a_capacity_out_of_range_is_a_config_error(path, capacity_bytes):
    with pytest.raises(ConfigError, match="give 4KiB to 8TiB"):
        LocalStore(path, capacity_bytes)


@pytest.mark.parametrize("capacity_bytes", [CAPACITY_BYTES // 2, CAPACITY_BYTES * 2])
def test_another_capacity_names_both_and_loses_nothing(bench, path, capacity_bytes):
    data = payload(0, SLOT)
    bench.put("a", data)
    assert_refused_untouched(
        path, ConfigError, rf"capacity {CAPACITY_BYTES} bytes .*, not {capacity_bytes} ", capacity_bytes
    )
    assert bench.get("a", SLOT) == (GetResult.OK, data)


def test_somebody_elses_files_are_left_alone(path):
    path.mkdir()
    (path / "thesis.tex").write_text("42")
    assert_refused_untouched(path, StoreError, "holds 'thesis.tex', which is not of a local store")


def test_a_file_in_place_of_the_directory_is_an_error(path):
    path.write_text("42")
    with pytest.raises(StoreError, match="Not a directory"):
        LocalStore(path, CAPACITY_BYTES)
    assert path.read_text() == "42"


@pytest.mark.parametrize("header", [b"", b"somebody else's meta file, not ours" * 20])
def test_a_foreign_meta_file_is_left_alone(path, header):
    path.mkdir()
    (path / "hkv-meta").write_bytes(header)
    assert_refused_untouched(path, StoreError, "no file of a local store")


def test_a_newer_format_is_left_alone(bench, path):
    bench.put("a", payload(0, SLOT))
    bench.store.close()
    with (path / "hkv-meta").open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<Q", 2))
    assert_refused_untouched(path, StoreError, "format version 2, this hybridkv reads 1")


@pytest.mark.parametrize("word", [2, 3])
def test_a_damaged_geometry_is_left_alone(bench, path, word):
    bench.store.close()
    with (path / "hkv-meta").open("r+b") as file:
        file.seek(8 * word)
        file.write(struct.pack("<Q", 77))
    assert_refused_untouched(path, StoreError, "damaged header")


def test_a_damaged_chunk_table_is_refused(bench, path):
    bench.store.close()
    with (path / "hkv-meta").open("r+b") as file:
        file.seek(Geometry.of(CAPACITY_BYTES).chunks_offset)
        file.write(struct.pack("<Q", 77))
    with pytest.raises(StoreError, match="the meta file is damaged"):
        LocalStore(path, CAPACITY_BYTES)


@pytest.mark.parametrize("name", ["hkv-arena", "hkv-meta"])
def test_a_truncated_file_is_refused_and_good_again_once_restored(bench, path, name):
    data = payload(0, SLOT)
    bench.put("a", data)
    bench.store.close()
    whole = (path / name).read_bytes()
    os.truncate(path / name, len(whole) - 8192)
    with pytest.raises(StoreError, match=f"{name} has .* bytes instead of"):
        LocalStore(path, CAPACITY_BYTES)
    (path / name).write_bytes(whole)
    assert Workbench(LocalStore(path, CAPACITY_BYTES), SLOT).get("a", SLOT) == (GetResult.OK, data)


def test_a_read_only_directory_is_an_error(path, monkeypatch):
    """Root may write anywhere, so the operating system's answer is feigned."""

    def refuse(*_arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    path.mkdir()
    monkeypatch.setattr(directory.os, "open", refuse)
    with pytest.raises(StoreError, match="Read-only file system"):
        LocalStore(path, CAPACITY_BYTES)


# --- space -------------------------------------------------------------------------------------------------


def test_a_capacity_above_the_free_space_is_refused(path):
    with pytest.raises(ConfigError, match=r"capacity 7TiB needs .* are free; lower the capacity"):
        LocalStore(path, 7 * 2**40)
    assert not (path / "hkv-arena").exists()


def test_in_dev_shm_the_remedy_names_docker():
    path = Path(f"/dev/shm/hybridkv-test-{os.getpid()}")
    try:
        with pytest.raises(ConfigError, match="--shm-size"):
            LocalStore(path, 7 * 2**40)
    finally:
        shutil.rmtree(path)


def fail_with(error: int, *, calls_before: int):
    real, count = os.posix_fallocate, 0

    def allocate(fd, offset, num_bytes):
        nonlocal count
        count += 1
        if count > calls_before:
            raise OSError(error, os.strerror(error))
        real(fd, offset, num_bytes)

    return allocate


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_disk_that_fills_up_during_creation_leaves_no_store(path, monkeypatch, calls_before):
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail_with(errno.ENOSPC, calls_before=calls_before))
        with pytest.raises(ConfigError, match="are free"):
            LocalStore(path, CAPACITY_BYTES)
    assert not (path / "hkv-arena").exists()
    LocalStore(path, CAPACITY_BYTES).close()


def test_an_input_output_error_during_creation_is_a_store_error(path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.EIO, calls_before=0))
    with pytest.raises(StoreError, match="Input/output error"):
        LocalStore(path, CAPACITY_BYTES)


def test_a_full_disk_refuses_objects_that_need_records_and_serves_the_others(bench, monkeypatch):
    data = payload(0, SLOT)
    bench.put("a", data)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail_with(errno.ENOSPC, calls_before=0))
        assert bench.put("large", payload(1, 2 * SLOT)) is PutResult.REFUSED
        assert bench.get("a", SLOT) == (GetResult.OK, data)
        patch.setattr(os, "posix_fallocate", fail_with(errno.EIO, calls_before=0))
        with pytest.raises(StoreError, match="Input/output error"):
            bench.put("large", payload(1, 2 * SLOT))
    assert bench.put("large", payload(1, 2 * SLOT)) is PutResult.STORED
    assert bench.store.check().reserved_objects == 0


def test_holes_in_a_copied_arena_get_their_space(bench, path):
    bench.store.close()
    num_bytes = (path / "hkv-arena").stat().st_size
    (path / "hkv-arena").unlink()
    (path / "hkv-arena").touch()
    os.truncate(path / "hkv-arena", num_bytes)
    LocalStore(path)
    assert (path / "hkv-arena").stat().st_blocks * 512 >= num_bytes


def test_the_space_of_an_arena_whose_making_was_killed_is_free_for_the_next(path, monkeypatch):
    def die(point):
        if point == "create: arena allocated":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalStore(path, CAPACITY_BYTES, at_point=die)
    real = os.statvfs

    def statvfs(of):
        """A file system that has room for one such store."""
        room = [*real(of)]
        room[4] = (2 * CAPACITY_BYTES - files_bytes(path)) // room[1]
        return os.statvfs_result(room)

    monkeypatch.setattr(os, "statvfs", statvfs)
    LocalStore(path, CAPACITY_BYTES).close()


def files_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("hkv-arena"))


def test_a_store_that_cannot_be_opened_keeps_nothing_open(bench, path):
    bench.store.close()
    with (path / "hkv-meta").open("r+b") as file:
        file.seek(Geometry.of(CAPACITY_BYTES).chunks_offset)
        file.write(struct.pack("<Q", 77))
    with pytest.raises(StoreError, match="damaged"):
        LocalStore(path)
    assert not list((path / "hkv-own").iterdir())
    gc.collect()
    assert not [file for file in held_files() if str(path) in file]


def held_files() -> list[str]:
    return [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]


def test_holes_in_a_copied_meta_file_get_their_space(path, monkeypatch):
    data = payload(0, SLOT)
    store = LocalStore(path, 16 * CAPACITY_BYTES)
    Workbench(store, SLOT).put("a", data)
    store.close()
    space = (path / "hkv-meta").stat().st_blocks
    whole = (path / "hkv-meta").read_bytes()
    with (path / "hkv-meta").open("wb") as file:
        for start in range(0, len(whole), 4096):
            if any(whole[start : start + 4096]):
                file.seek(start)
                file.write(whole[start : start + 4096])
        file.truncate(len(whole))
    assert (path / "hkv-meta").stat().st_blocks < space
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail_with(errno.ENOSPC, calls_before=0))
        with pytest.raises(StoreError, match="no space left"):
            LocalStore(path)
    copied = Workbench(LocalStore(path), SLOT)
    assert (path / "hkv-meta").stat().st_blocks >= space
    assert copied.get("a", SLOT) == (GetResult.OK, data)


# --- sharing ------------------------------------------------------------------------------------------------


def test_files_are_for_their_owner_only(bench, path):
    bench.put("a", payload(0, SLOT))
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in [path, *path.rglob("*")]}
    assert modes.pop("store") == modes.pop("hkv-own") == 0o700
    assert set(modes.values()) == {0o600}


def test_two_layouts_share_one_directory(bench, path):
    other = Workbench(LocalStore(path), 80 * SLOT)
    small, large = payload(0, SLOT), payload(1, 3 * SLOT)
    bench.put("small", small)
    other.put("large", large)
    assert other.get("small", SLOT) == (GetResult.OK, small)
    assert bench.get("large", 3 * SLOT) == (GetResult.OK, large)
    # A layout that nobody uses any more gives its chunks up.
    for idx in range(200):
        assert bench.put(f"small/{idx}", small) is PutResult.STORED
    assert not bench.contains("large")
    other.store.close()


def _use_after_fork(store, results) -> None:
    try:
        store.contains(["a"])
    except StoreClosedError as error:
        store.close()
        results.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_use_its_parents_store(bench):
    bench.put("a", payload(0, SLOT))
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_use_after_fork, args=(bench.store, results))
    child.start()
    assert "opened before this process was forked; open it anew" in results.get()
    child.join()
    assert bench.contains("a")
    assert bench.put("b", payload(1, SLOT)) is PutResult.STORED


def test_a_store_whose_directory_is_removed_says_so_and_touches_no_new_one(bench, path):
    data = payload(0, SLOT)
    bench.put("a", data)
    shutil.rmtree(path)
    new = Workbench(LocalStore(path, CAPACITY_BYTES), SLOT)
    assert bench.get("a", SLOT) == (GetResult.OK, data)
    with pytest.raises(StoreError, match="was removed or replaced while it was open; open it anew"):
        bench.put("b", data)
    bench.store.close()
    assert len(list((path / "hkv-own").iterdir())) == 1
    assert new.put("c", data) is PutResult.STORED
    new.store.close()


@pytest.mark.parametrize("name", ["hkv-lock", "hkv-own/1"])
def test_a_store_whose_lock_is_removed_says_so(bench, path, name):
    (path / name).unlink()
    with pytest.raises(StoreError, match="was removed or replaced"):
        bench.put("a", payload(0, SLOT))


def test_a_store_whose_directory_is_renamed_stays_whole(bench, path):
    other = Workbench(LocalStore(path), 80 * SLOT)
    path.rename(path.parent / "elsewhere")
    new = LocalStore(path, CAPACITY_BYTES)
    assert not bench.store._directory.is_dead(other.store._directory.owner)
    other.store.close()
    assert bench.put("a", payload(0, SLOT)) is PutResult.STORED
    new.close()


def test_a_removed_meta_file_harms_nobody_who_has_it_open(bench, path):
    data = payload(0, SLOT)
    bench.put("a", data)
    (path / "hkv-meta").unlink()
    new = Workbench(LocalStore(path, CAPACITY_BYTES), 80 * SLOT)
    assert new.store._directory.owner != bench.store._directory.owner
    for idx in range(64):
        assert new.put(f"{idx}", payload(idx, SLOT)) is PutResult.STORED
    assert bench.get("a", SLOT) == (GetResult.OK, data)
    new.store.close()


def test_a_put_without_free_file_descriptors_is_a_store_error(bench, path, monkeypatch):
    """One that has to find out whether others' reservations are dead."""

    def refuse(*_arguments, **_named):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    keys = [f"{idx}" for idx in range(64)]
    bench.store.put(keys, [bench.source(payload(idx, SLOT)) for idx in range(64)])
    other = LocalStore(path)
    with other._directory.locked():
        other._table.take(other._table.published()[:4])
    with monkeypatch.context() as patch:
        patch.setattr(directory.os, "open", refuse)
        with pytest.raises(StoreError, match="Too many open files"):
            bench.put("a", payload(0, SLOT))
    assert bench.put("a", payload(0, SLOT)) is PutResult.STORED
    other.close()


# --- clocks -------------------------------------------------------------------------------------------------


def test_after_a_restart_of_the_machine_the_order_of_use_goes_on(bench, path, monkeypatch):
    for idx in range(64):
        bench.put(f"old/{idx}", payload(idx, SLOT))
    bench.store.close()
    monkeypatch.setattr("time.monotonic_ns", lambda: 1000)
    store = LocalStore(path)
    monkeypatch.undo()
    again = Workbench(store, SLOT)
    assert int(store._table.header[HeaderWord.STAMP_BASE]) > 0
    assert again.put("new", payload("new", SLOT)) is PutResult.STORED
    assert store.contains(["old/0", "old/1", "old/63", "new"]) == [False, True, True, True]


def test_a_wall_clock_that_was_set_back_makes_no_age_negative(bench, monkeypatch):
    bench.put("a", payload(0, SLOT))
    monkeypatch.setattr("time.time_ns", lambda: 0)
    assert [info.age_s for info in bench.store.list()] == [0]
