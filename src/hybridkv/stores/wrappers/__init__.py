"""Stores around stores; each is itself a store and takes the inner one as its first argument."""

from hybridkv.stores.wrappers.base import StoreWrapper
from hybridkv.stores.wrappers.faulty import Fault, FaultyStore
from hybridkv.stores.wrappers.latency import LatencyStore
from hybridkv.stores.wrappers.metered import MeteredStore, OperationCounts

__all__ = ["Fault", "FaultyStore", "LatencyStore", "MeteredStore", "OperationCounts", "StoreWrapper"]
