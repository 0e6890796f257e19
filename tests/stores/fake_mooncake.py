"""A stand-in for Mooncake's library and master: values in a dict, codes as the real ones give them."""

import ctypes
import threading
from types import SimpleNamespace

from hybridkv.errors import StoreUnavailableError
from hybridkv.stores.mooncake.library import Library
from hybridkv.stores.mooncake.master import ClusterCounts

NO_ROOM, INVALID, ABSENT, FAILED, NO_ANSWER = -200, -600, -704, -800, -900


class FakeCluster:
    """One dict for all clients, and the faults that a test sets.

    Attributes:
        values: by name.
        capacity: bytes of all values together.
        answer: a code that every call gives instead of its own, or ``None``.
        num_room: puts that find no room before the next finds some.
        hangs: cleared, calls wait for it.
    """

    def __init__(self):
        self.values, self.groups, self.clients = {}, [], []
        self.capacity = 1 << 40
        self.answer = None
        self.num_full = 0
        self.setup_code = 0
        self.hangs = threading.Event()
        self.hangs.set()
        self.lock = threading.Lock()
        self.calls = []

    @property
    def library(self):
        return Library(lambda: FakeClient(self), lambda: SimpleNamespace(replica_num=1, group_ids=None))


class FakeClient:
    """What the store calls of ``MooncakeDistributedStore``; any call before set-up or after close fails."""

    def __init__(self, cluster):
        self._cluster, self._is_up, self._registered = cluster, False, {}
        self.answer = None
        cluster.clients.append(self)

    def setup(self, *arguments, **names):
        self._is_up = self._cluster.setup_code == 0
        self.arguments = (arguments, names)
        return self._cluster.setup_code

    def close(self):
        self._check()
        self._is_up = False
        return 0

    def health_check(self):
        self._check()
        return 0

    def register_buffer(self, address, num_bytes):
        self._check()
        if any(
            address < start + size and start < address + num_bytes for start, size in self._registered.items()
        ):
            return INVALID
        self._registered[address] = num_bytes
        return 0

    def unregister_buffer(self, address):
        self._check()
        return 0 if self._registered.pop(address, None) else INVALID

    def batch_is_exist(self, names):
        return self._each(names, lambda name: int(name in self._cluster.values))

    def batch_remove(self, names, force):
        assert force
        return self._each(
            names, lambda name: 0 if self._cluster.values.pop(name, None) is not None else ABSENT
        )

    def batch_put_from_multi_buffers(self, names, addresses, sizes, config):
        assert len(config.group_ids) == len(names)
        assert sum(map(len, addresses)) <= 256
        self._cluster.groups += config.group_ids
        return self._each(names, self._put, addresses, sizes)

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        assert len(set(names)) == len(names)
        return self._each(names, self._get, addresses, sizes)

    def batch_get_replica_desc(self, names):
        self._check()
        return {
            name: [_replica(self._cluster.values[name])] for name in names if name in self._cluster.values
        }

    def _put(self, name, addresses, sizes):
        cluster = self._cluster
        self._check_registered(addresses, sizes)
        if name in cluster.values:
            return 0
        if cluster.num_full:
            cluster.num_full -= 1
            return NO_ROOM
        value = b"".join(
            ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)
        )
        if sum(map(len, cluster.values.values())) + len(value) > cluster.capacity:
            return NO_ROOM
        cluster.values[name] = value
        return 0

    def _get(self, name, addresses, sizes):
        self._check_registered(addresses, sizes)
        value = self._cluster.values.get(name)
        if value is None:
            return ABSENT
        if sum(sizes) != len(value):
            return INVALID if sum(sizes) < len(value) else FAILED
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, value[:size], size)
            value = value[size:]
        return sum(sizes)

    def _each(self, names, call, *columns):
        self._check()
        self._cluster.calls.append(len(names))
        self._cluster.hangs.wait(60)
        answer = self._cluster.answer if self.answer is None else self.answer
        if callable(answer):
            return answer(names)
        if answer is not None:
            return [answer] * len(names)
        with self._cluster.lock:
            return [call(*row) for row in zip(names, *columns, strict=True)]

    def _check(self):
        assert self._is_up, "the real library ends the process here"

    def _check_registered(self, addresses, sizes):
        for address, size in zip(addresses, sizes, strict=True):
            assert any(
                start <= address and address + size <= start + num for start, num in self._registered.items()
            )


def _replica(value):
    descriptor = SimpleNamespace(buffer_descriptor=SimpleNamespace(size=len(value)))
    return SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: descriptor)


class FakeMaster:
    """The master's HTTP interface."""

    def __init__(self, cluster):
        self.cluster, self.is_away, self.frozen = cluster, False, False

    def is_frozen(self, _timeout_s):
        return self.frozen

    def names(self):
        self._check()
        return list(self.cluster.values)

    def sizes(self, names):
        return ((name, len(self.cluster.values[name])) for name in names if name in self.cluster.values)

    def counts(self):
        self._check()
        return ClusterCounts(capacity_bytes=self.cluster.capacity, evicted_objects=0, evicted_bytes=0)

    def _check(self):
        if self.is_away:
            raise StoreUnavailableError("no HTTP")
