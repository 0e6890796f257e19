"""A storage node in a process of its own: ``python -m hybridkv.stores.mooncake.node URI``.

It contributes the URI's segment to the cluster until it is told to end by SIGTERM or SIGINT.
"""

import signal
import sys

from hybridkv.errors import HybridKVError
from hybridkv.stores.mooncake.client import Client
from hybridkv.stores.mooncake.library import load_library
from hybridkv.stores.mooncake.settings import settings_of
from hybridkv.stores.registry import parse_store_uri

CLOSE_S = 5.0


def main() -> None:
    """Serve, and say ``ready`` on standard output when the cluster has the memory."""
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the library starts its threads
    try:
        client = Client(load_library(), settings_of(parse_store_uri(sys.argv[1])))
    except HybridKVError as error:
        sys.exit(f"hybridkv: {error}")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.sigwait(ends)
    client.close(CLOSE_S)


if __name__ == "__main__":
    main()
