"""Every error that hybridkv raises on purpose.

::

    HybridKVError
    ├── SpecError (ValueError)        a spec, group or layout that cannot work
    ├── KeySchemeError (ValueError)   a key or namespace that cannot be formed
    ├── ConfigError (ValueError)      a setting or URI that makes no sense
    ├── TraceError (ValueError)       a request trace that cannot be read
    ├── StoreError                    a store call that cannot be carried out
    │   ├── StoreClosedError          ... because the store is closed
    │   └── StoreUnavailableError     ... because the store does not answer
    ├── TransferError                 a copy to or from block memory that cannot be carried out
    └── CorruptPayloadError           loaded bytes are not what was saved

A miss is a return value, never an error.
"""


class HybridKVError(Exception):
    """Base of all errors that hybridkv raises on purpose."""


class SpecError(HybridKVError, ValueError):
    """A spec, cache group or layout is wrong; the message names the group, the value and the remedy."""


class KeySchemeError(HybridKVError, ValueError):
    """A key or a namespace cannot be formed from what was given."""


class ConfigError(HybridKVError, ValueError):
    """A setting, file or URI is wrong; the message names the field and the remedy."""


class TraceError(HybridKVError, ValueError):
    """A request trace cannot be read; the message names the line and the reason."""


class StoreError(HybridKVError):
    """A store call was refused as a whole; no byte was moved."""


class StoreClosedError(StoreError):
    """The store was used after ``close()``."""


class StoreUnavailableError(StoreError):
    """The store does not answer; the caller may treat a lookup as a miss."""


class TransferError(HybridKVError):
    """A copy between block memory and host memory was refused; the message names what does not fit."""


class CorruptPayloadError(HybridKVError):
    """Loaded bytes differ from the bytes that were saved under the key."""
