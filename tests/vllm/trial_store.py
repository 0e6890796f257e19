"""A store that misbehaves as its URI says, around another one; engines in other processes find it by scheme.

``trial://?inner=URI&put_ms=N&gate=FILE&kill_at=N``
"""

import os
import signal
import sys
import time
from pathlib import Path
from urllib.parse import quote

from hybridkv.stores.registry import ENTRY_POINT_GROUP, open_store
from hybridkv.stores.wrappers.base import StoreWrapper


class TrialStore(StoreWrapper):
    """Puts take longer; gets wait while the gate's file is there; the n-th copied payload is the last."""

    def __init__(self, inner, *, put_s=0.0, gate=None, kill_at=0):
        super().__init__(inner)
        self._put_s, self._gate = put_s, gate
        self._left = kill_at
        if kill_at:
            inner._putting._at_point = self._at_point

    def put(self, keys, sources, hints=None):
        time.sleep(self._put_s)
        return self._inner.put(keys, sources, hints)

    def get(self, keys, targets):
        while self._gate is not None and self._gate.exists():
            time.sleep(0.02)
        return self._inner.get(keys, targets)

    def _at_point(self, point):
        if point == "put: one payload copied":
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def open_trial(uri):
    uri.check_settings("inner", "put_ms", "gate", "kill_at")
    gate = uri.query.get("gate")
    return TrialStore(
        open_store(uri.query["inner"]),
        put_s=int(uri.query.get("put_ms", "0")) / 1000,
        gate=Path(gate) if gate else None,
        kill_at=int(uri.query.get("kill_at", "0")),
    )


def trial_uri(inner, **settings):
    query = {"inner": quote(inner, safe=""), **settings}
    return "trial://?" + "&".join(f"{name}={value}" for name, value in query.items())


def install(directory):
    """Make the scheme known to processes that have the directory on their path."""
    info = directory / "hybridkv_trial-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hybridkv-trial\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\ntrial = {__name__}:open_trial\n")
    assert __name__ in sys.modules
    return directory
