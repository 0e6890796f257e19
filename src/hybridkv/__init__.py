"""hybridkv: KV cache outside the serving engine, for models that mix kinds of attention.

The names below are the library's surface; modules beside them are described in docs/architecture.md.
"""

from hybridkv.errors import HybridKVError
from hybridkv.keys import BlockHasher, KeyScheme, Manifest, Namespace
from hybridkv.plan.load import plan_load
from hybridkv.plan.lookup import Lookup, LookupResult
from hybridkv.plan.save import GroupSave, plan_save
from hybridkv.service.lookup import LookupDriver, LookupOutcome
from hybridkv.specs.chunked_local import ChunkedLocal
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.group import CacheGroup, SpecGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.layout_file import catalogue, find_layout
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.stores.base import GetResult, PutResult, Store
from hybridkv.stores.registry import open_store

__version__ = "0.1.0"

__all__ = [
    "MLA",
    "BlockHasher",
    "CacheGroup",
    "ChunkedLocal",
    "Full",
    "GetResult",
    "GroupSave",
    "HybridKVError",
    "KeyScheme",
    "Layout",
    "Lookup",
    "LookupDriver",
    "LookupOutcome",
    "LookupResult",
    "Manifest",
    "Namespace",
    "PutResult",
    "Recurrent",
    "SlidingWindow",
    "SpecGroup",
    "Store",
    "catalogue",
    "find_layout",
    "open_store",
    "plan_load",
    "plan_save",
]
