"""What the scheduler side tells an engine's adapter: progress, events and counters."""

from dataclasses import dataclass

from hybridkv.service.tables import Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """Tells routers of consecutive objects that every rank has stored.

    Attributes:
        spec_group: index of the spec group.
        block_hashes: name the objects, in order, laid end to end: each is the parent of the next.
        parent_hash: names the object before the first one in its prefix chain, stored now or not; empty
            where there is none.
        object_size: tokens of each object.
    """

    spec_group: int
    block_hashes: bytes
    parent_hash: bytes
    object_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a report changed for the engine.

    Attributes:
        loaded: requests whose load is complete.
        load_failed: requests whose load failed; their blocks hold nothing of use, look them up again.
        released: blocks that jobs held and hold no more.
        stored: what saves have stored, or found stored, once on all ranks.
    """

    loaded: tuple[str, ...] = ()
    load_failed: tuple[str, ...] = ()
    released: Blocks = frozenset()
    stored: tuple[StoredEvent, ...] = ()


@dataclass(slots=True)
class Counters:
    """What happened so far.

    Attributes:
        hit_tokens: beyond the devices' prefixes.
        loads: that were started.
        lookups_late: that were given up before a thread was free for them.
        loads_failed: loads that did not fill all their blocks.
        saves_cut: times that something was left to later steps for want of ``pinned_blocks``.
        unfilled_blocks: blocks that an engine allocated otherwise than planned.
        objects_stored: that saves have stored, or found stored, on every rank.
    """

    hit_tokens: int = 0
    loads: int = 0
    lookups_late: int = 0
    loads_failed: int = 0
    saves_cut: int = 0
    unfilled_blocks: int = 0
    objects_stored: int = 0
