"""The master's HTTP interface: lists and counts objects without taking the leases that RPCs take."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import quote
from urllib.request import ProxyHandler, build_opener

from hybridkv.errors import StoreUnavailableError

_BATCH_NAMES = 100
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCounts:
    """The master's own counts, of everything that is stored there."""

    capacity_bytes: int
    evicted_objects: int
    evicted_bytes: int


class Master:
    """Asks one master.

    Args:
        address: ``host:port`` of its HTTP interface (``--metrics_host``, ``--metrics_port``).
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._opener = build_opener(ProxyHandler({}))  # a proxy for the web leads to no master

    def is_frozen(self, timeout_s: float) -> bool:
        """Tell whether the master takes a connection but says nothing; ``False`` where it takes none."""
        if not self._address:
            return False
        try:
            self._opener.open(f"http://{self._address}/health", timeout=timeout_s).close()
        except TimeoutError:
            return True
        except (OSError, HTTPException) as error:
            return isinstance(getattr(error, "reason", None), TimeoutError)
        return False

    def names(self) -> list[str]:
        """Return the names of all values.

        Raises:
            StoreUnavailableError: the master does not answer.
        """
        return [name for name in self._read("/get_all_keys").split("\n") if name]

    def sizes(self, names: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yield (name, bytes) of those values that are still there; no name has a comma.

        Raises:
            StoreUnavailableError: the master does not answer.
        """
        for start in range(0, len(names), _BATCH_NAMES):
            asked = ",".join(quote(name, safe="") for name in names[start : start + _BATCH_NAMES])
            answer = self._read(f"/batch_query_keys?keys={asked}")
            try:
                data = json.loads(answer)["data"]
                found = {name: _num_bytes(value) for name, value in data.items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise StoreUnavailableError(
                    f"what answers at {self._address} is no Mooncake master of a known version"
                ) from None
            yield from ((name, size) for name, size in found.items() if size)

    def counts(self) -> ClusterCounts:
        """Return the master's counts.

        Raises:
            StoreUnavailableError: the master does not answer.
        """
        text = self._read("/metrics")
        return ClusterCounts(
            capacity_bytes=self._metric(text, "master_total_capacity_bytes"),
            evicted_objects=self._metric(text, "master_evicted_key_count"),
            evicted_bytes=self._metric(text, "master_evicted_size_bytes"),
        )

    def _metric(self, text: str, name: str) -> int:
        found = re.search(rf"^{name} ([0-9.e+]+)$", text, re.MULTILINE)
        if found is None:
            raise StoreUnavailableError(
                f"what answers at {self._address} is no Mooncake master: it has no {name}"
            )
        return int(float(found[1]))

    def _read(self, path: str) -> str:
        if not self._address:
            raise StoreUnavailableError("listing needs the master's HTTP interface: add http=host:port")
        try:
            with self._opener.open(f"http://{self._address}{path}", timeout=_TIMEOUT_S) as answer:
                body: bytes = answer.read()
        except (OSError, HTTPException) as error:
            raise StoreUnavailableError(
                f"the master's HTTP interface at {self._address} does not answer ({error}); "
                "it is set by the master's --metrics_port and the store's http=host:port"
            ) from None
        return body.decode(errors="replace")


def _num_bytes(value: dict[str, object]) -> int:
    """Return the bytes of a value wherever its first replica lies; 0 where it has none."""
    for place in ("values", "local_disk_values", "disk_values"):
        replicas = value.get(place)
        if isinstance(replicas, list) and replicas:
            size = replicas[0].get("size_", replicas[0].get("object_size", 0))
            return int(size)
    return 0
