"""Mooncake's Python library, imported when it is first needed and with sane limits in its environment.

The library reads its environment once: when it is imported, and when its first client is set up. What an
operator has set stays.
"""

import os
from dataclasses import dataclass
from typing import Any

from hybridkv.errors import ConfigError

ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
"""Unless set: one try to set up; a frozen master or node costs seconds, where the default is 30; queues that
hold what is in flight."""

_MISSING = (
    "a mooncake:// store needs Mooncake's Python library: pip install 'hybridkv[mooncake]' "
    "(on hosts with CUDA: pip install mooncake-transfer-engine)"
)
_BROKEN = (
    "Mooncake's library cannot be loaded: {}; on Debian and Ubuntu: "
    "apt-get install libibverbs1 libcurl4 libnuma1 (docs/mooncake.md has a way without root)"
)


@dataclass(frozen=True, slots=True)
class Library:
    """The two classes of ``mooncake.store`` that are used."""

    client: Any
    config: Any


def load_library() -> Library:
    """Import Mooncake.

    Raises:
        ConfigError: it, or a library that it needs, is missing; the message has the command that installs it.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: PLC0415 - optional
    except ModuleNotFoundError:
        raise ConfigError(_MISSING) from None
    except ImportError as error:
        raise ConfigError(_BROKEN.format(error)) from None
    return Library(MooncakeDistributedStore, ReplicateConfig)
