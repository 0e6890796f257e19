"""The store contract in executable form: an example suite and a state machine.

::

    class TestMyStore(StoreTests):
        def make_store(self, capacity_bytes):
            return MyStore(capacity_bytes)

    def test_my_store_behaves_like_a_dict():
        run_store_machine(MyStore)
        run_store_machine(MyStore, capacity_bytes=100)

Needs pytest and hypothesis: ``pip install 'hybridkv[testing]'``.
"""

from hybridkv.testing.stores.contents import ContentTests
from hybridkv.testing.stores.machine import run_store_machine
from hybridkv.testing.stores.refusals import RefusalTests
from hybridkv.testing.stores.room import RoomTests
from hybridkv.testing.stores.workbench import MakeStore, Workbench, payload

__all__ = ["MakeStore", "StoreTests", "Workbench", "payload", "run_store_machine"]


class StoreTests(ContentTests, RefusalTests, RoomTests):
    """All examples of the store contract; subclass it and override ``make_store``.

    Also to be set, where a store needs it: ``object_bytes``, ``capacity_objects`` and ``is_lru``, which
    ``StoreExamples`` describes.
    """
