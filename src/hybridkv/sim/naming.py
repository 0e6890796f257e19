"""Names for the hash units of a trace's prompts: stand-ins for the chained block hashes of an engine.

A trace says which prompts are equal 512 tokens at a time, an engine hashes every ``hash_unit`` tokens. The
unit that ends at token t is therefore named by its owner, the id of the 512-token block that holds token
t - 1, and by t::

    hash_ids      |        7        |        9        |   12
    tokens        0                512              1024   1200
    units of 400          400         800          1200
    names               (7, 400)    (9, 800)    (12, 1200)

An id has one parent, so its name fixes all tokens before it: equal names mean equal prefixes of t tokens.

An id says nothing about equality inside its 512 tokens: when a conversation goes on, its partial last block
gets a new id although it begins with the same tokens. So there are two conventions:

``distinct``
    Blocks with different ids share nothing: a lower bound of what could be reused.
``continued``
    A longer prompt that holds all full ids of earlier prompts continues the longest of them, at ties the
    latest, and shares its partial tail, transitively: an upper bound. A prompt below 512 tokens has no full
    id, so every longer prompt holds all of its full ids.

Where a prompt continues another one, units up to the end of the tail are named as in the tail::

    earlier prompt   |      7      |  9  |           9 is partial and ends at 700
    this prompt      |      7      |    12      |    12 is new: units up to 700 are named as in 9
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from hybridkv.errors import ConfigError
from hybridkv.sim.trace import NO_PARENT, TOKENS_PER_ID, TraceRequest

Tails = Literal["distinct", "continued"]

NAME_BYTES = 16  # owner id and end token, each a big-endian u64


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPrompt:
    """The names of a prompt's hash units.

    Attributes:
        blob: 16 bytes a complete unit, in order: owner id and end token as big-endian u64. Two prompts of one
            namer have equal bytes for a unit exactly when all their tokens up to its end are equal.
        shared: leading tokens that an earlier prompt of the namer has too, in [0, input_length]. Units that
            end at or below it have known names, all later ones have new names.
    """

    blob: bytes
    shared: int


class UnitNamer:
    """Names the hash units of a trace's prompts, one prompt after the other.

    The requests must be those of one valid trace (see ``hybridkv.sim.trace``), in order.

    An id's naming is fixed when the id is first seen, since an id always means one content. Only the first
    new id of a prompt can continue a tail: the ids before it are fixed, and no earlier prompt's full ids
    reach beyond it.

    Args:
        tails: the convention for partial last blocks.
        hash_unit: tokens per hash unit, >= 1; it need not divide 512.

    Raises:
        ConfigError: either makes no sense.

    Example:
        >>> from hybridkv.sim.trace import TraceRequest
        >>> turns = [
        ...     TraceRequest(timestamp_ms=0, input_length=700, output_length=9, hash_ids=(7, 9), line=1),
        ...     TraceRequest(timestamp_ms=5, input_length=900, output_length=9, hash_ids=(7, 12), line=2),
        ... ]
        >>> namer = UnitNamer("continued", 400)
        >>> [namer.name(turn).shared for turn in turns]
        [0, 700]
        >>> namer.name(turns[1]).blob.hex(" ", 8)
        '0000000000000007 0000000000000190 000000000000000c 0000000000000320'
    """

    def __init__(self, tails: Tails, hash_unit: int) -> None:
        if tails not in get_args(Tails):
            raise ConfigError(f"tails is {tails!r}; choose one of {', '.join(get_args(Tails))}")
        if hash_unit < 1:
            raise ConfigError(f"hash_unit is {hash_unit}; give at least 1 token")
        self._tails = tails
        self._hash_unit = hash_unit
        self._seen: set[int] = set()
        # last full id -> where tails after it end -> the latest such tail id
        self._ends_after: defaultdict[int, dict[int, int]] = defaultdict(dict)
        # id -> the tail id that it continues, and where that ends
        self._continues: dict[int, tuple[int, int]] = {}
        self._names, self._block_idx = _template(0, hash_unit)

    def name(self, request: TraceRequest) -> NamedPrompt:
        """Return the names of a prompt, which then counts among the earlier ones."""
        ids, length = request.hash_ids, request.input_length
        num_known = next((idx for idx, block in enumerate(ids) if block not in self._seen), len(ids))
        shared = min(num_known * TOKENS_PER_ID, length)
        if self._tails == "continued":
            if num_known < len(ids):
                shared = self._continue_longest(ids, num_known, length) or shared
            self._remember_tail(ids, length)
        self._seen.update(ids[num_known:])
        return NamedPrompt(blob=self._blob(ids, length), shared=shared)

    def _continue_longest(self, ids: tuple[int, ...], num_known: int, length: int) -> int:
        """Let the first new id continue the longest tail after the known ids; return its end, else 0."""
        ends = self._ends_after.get(_parent(ids, num_known), {})
        end = max((end for end in ends if end < length), default=0)
        if end:
            self._continues[ids[num_known]] = (ends[end], end)
        return end

    def _remember_tail(self, ids: tuple[int, ...], length: int) -> None:
        num_full, partial = divmod(length, TOKENS_PER_ID)
        if partial:
            self._ends_after[_parent(ids, num_full)][length] = ids[num_full]

    def _blob(self, ids: tuple[int, ...], length: int) -> bytes:
        num_units = length // self._hash_unit
        if num_units > len(self._names):
            self._names, self._block_idx = _template(2 * num_units, self._hash_unit)
        names = self._names[:num_units].copy()
        owners = names[:, 0]
        owners[:] = np.array(ids, dtype=">u8")[self._block_idx[:num_units]]
        for idx, block in enumerate(ids):
            start = idx * TOKENS_PER_ID // self._hash_unit
            tail = self._continues.get(block)
            while tail is not None:  # each tail of the chain ends before the one that continues it
                owner, end = tail
                owners[start : end // self._hash_unit] = owner
                tail = self._continues.get(owner)
        return names.tobytes()


def _parent(ids: tuple[int, ...], idx: int) -> int:
    return ids[idx - 1] if idx else NO_PARENT


def _template(num_units: int, hash_unit: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return what names of all prompts have in common, for a number of units.

    Returns:
        names: shape (num_units, 2), big-endian u64, owners still 0 and the end token of each unit.
        block_idx: shape (num_units,), i64, the 512-token block that holds each unit's last token.
    """
    ends = np.arange(1, num_units + 1, dtype=np.int64) * hash_unit
    names = np.zeros((num_units, 2), dtype=">u8")
    names[:, 1] = ends
    return names, (ends - 1) // TOKENS_PER_ID
