"""Wedges the client of a store past all guards, and uses the store again."""

import os
import sys
import time

from hybridkv.errors import StoreUnavailableError
from hybridkv.stores.base import GetResult, PutResult
from hybridkv.stores.registry import open_store
from hybridkv.testing.stores import Workbench, payload

if __name__ == "__main__":
    store = open_store(f"{sys.argv[1]}&timeout=8")
    bench = Workbench(store, 64 << 20)
    start, values = bench.region.address, range(128)
    pieces = [[start + (64 * value + idx) * 8192 for idx in range(64)] for value in values]
    names = [f"wedge/{value}" for value in values]
    for _ in range(5):
        try:
            store._connection.call(lambda client: client.put(names, pieces, [[8192] * 64] * 128, names))
            store._connection.call(lambda client: client.remove(names))
        except StoreUnavailableError as error:
            sys.stderr.write(f"{error}\n")
            if "within 8 s" in str(error):
                sys.stdout.write("wedged\n")
                break
    if store.num_rebuilt == 1:
        sys.stdout.write("replaced\n")
    deadline_s, data = time.monotonic() + 30, payload(0, 100_000)
    while time.monotonic() < deadline_s:
        try:
            if bench.put("a", data, 5) in {PutResult.STORED, PutResult.ALREADY}:
                break
        except StoreUnavailableError as error:
            sys.stderr.write(f"{error}\n")
        time.sleep(0.5)
    if bench.get("a", len(data)) == (GetResult.OK, data):
        sys.stdout.write("right\n")
    sys.stdout.flush()
    os._exit(0)
