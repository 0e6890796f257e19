"""Worked examples at the border that an adapter sees: save by the plan, resend, and what is loaded."""

import pytest

from hybridkv.keys import BlockHasher, KeyScheme, Namespace
from hybridkv.service.lookup import LookupDriver
from hybridkv.service.messages import WorkerReport
from hybridkv.service.scheduler import SchedulerSide
from hybridkv.service.settings import SchedulerSettings
from hybridkv.specs.full import Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.layout_file import find_layout
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.stores.memory import MemoryStore
from hybridkv.transfer.moves import Ended, Outcome

PROMPT = [token % 251 for token in range(5000)]


def layout(*groups):
    return Layout(
        name="m",
        groups=tuple(
            CacheGroup(name=str(idx), spec=spec, lookahead=lookahead)
            for idx, (spec, lookahead) in enumerate(groups)
        ),
    )


def full(block_size, lookahead=0):
    return Full(block_size=block_size), lookahead


def window(size, block_size, lookahead=0):
    return SlidingWindow(block_size=block_size, window=size), lookahead


class Sizes:
    """A scheduler side whose worker stores every object's name at once, without bytes."""

    def __init__(self, made, **settings):
        self.layout, self.store = made, MemoryStore(keep_payloads=False)
        self.scheme = KeyScheme(Namespace(model_version="m"), made, digest_bytes=32)
        self.driver = LookupDriver(self.store, self.scheme)
        self.side = SchedulerSide(
            self.driver, self.scheme, SchedulerSettings(lookup_timeout_s=None, **settings)
        )
        self.num_requests = 0

    def blob(self, tokens):
        return BlockHasher(hash_unit=self.layout.hash_unit).hash_tokens(tokens)

    def serve(self, tokens, device_prefix=0, may_save=True):
        """Return the tokens to load; save what the prompt's plan says, states at every block."""
        self.num_requests += 1
        request_id = str(self.num_requests)
        hit = self.side.find_hit(
            request_id, len(tokens), self.blob(tokens), device_prefix=device_prefix, may_save=may_save
        )
        tables = [list(range(1, 2 + len(tokens) // g.spec.block_size)) for g in self.layout.groups]
        stops = [len(tokens)]
        if any(group.spec.written_only_at_step_end for group in self.layout.spec_groups):
            stops = [*range(self.layout.alignment, len(tokens), self.layout.alignment), len(tokens)]
        for stop in stops:
            self.side.advanced(request_id, stop, tables)
        self.events = []
        for job in self.side.take_step().jobs:
            moved = []
            for transfer in job.groups:
                keys = self.scheme.keys_of(transfer.spec_group, 0, transfer.digests)
                self.store.put(keys, [((0, 1),)] * len(keys))
                moved.append(b"\1" * len(keys))
            report = Ended(job_id=job.job_id, outcome=Outcome.DONE, marks=tuple(moved))
            self.events += self.side.report(WorkerReport(rank=0, ended=(report,))).stored
        self.side.forget(request_id)
        return hit - device_prefix


@pytest.mark.parametrize(("num_tokens", "load"), [(64, 48), (65, 64), (63, 48), (16, 0), (1, 0)])
def test_the_last_token_is_always_computed_again(num_tokens, load):
    sizes = Sizes(layout(full(16)))
    sizes.serve(PROMPT[:200])
    assert sizes.serve(PROMPT[:num_tokens]) == load


def test_a_device_that_holds_all_that_can_be_hit_costs_no_round_trip():
    sizes = Sizes(layout(full(16)))
    sizes.serve(PROMPT[:64])
    asked = []
    sizes.store.contains = lambda keys: asked.append(keys) or [True] * len(keys)
    assert sizes.serve(PROMPT[:64], device_prefix=48) == 0
    assert asked == []


def test_a_store_that_holds_less_than_the_device_adds_nothing():
    sizes = Sizes(layout(full(16)))
    sizes.serve(PROMPT[:16])
    assert sizes.serve(PROMPT[:100], device_prefix=32) == 0


def test_the_lookahead_of_a_window_costs_its_own_block_only():
    sizes = Sizes(layout(full(64), window(16, 16, lookahead=16)))
    sizes.serve(PROMPT[:100])
    assert sizes.serve(PROMPT[:100]) == 64


def test_the_guard_boundary_serves_a_prompt_that_diverges_in_the_last_alignment():
    sizes = Sizes(layout(full(32), window(1024, 16)), retention=0)
    sizes.serve(PROMPT[:4100])
    assert sizes.serve(PROMPT[:4090] + [999] * 10) == 4064


def test_recurrent_groups_are_neither_widened_nor_popped_by_lookahead():
    sizes = Sizes(layout(full(16, lookahead=16), (Recurrent(block_size=16), 16)))
    sizes.serve(PROMPT[:64])
    assert sizes.serve(PROMPT[:64]) == 48


def test_blocks_after_the_point_where_prompts_part_never_share_a_key():
    sizes = Sizes(Layout(name="m", hash_unit=4, groups=(CacheGroup(name="f", spec=Full(block_size=256)),)))
    one, two = sizes.blob(PROMPT[:2048]), sizes.blob(PROMPT[:1024] + [7] * 1024)
    keys = [sizes.scheme.keys(0, 0, range(8), blob) for blob in (one, two)]
    assert keys[0][:4] == keys[1][:4]
    assert not set(keys[0][4:]) & set(keys[1][4:])
    assert all(len(key.rsplit("/", 1)[1]) == 64 for key in keys[0])


@pytest.mark.parametrize(
    "made",
    [layout(full(16), window(128, 16)), layout(full(32), window(64, 16)), find_layout("gemma-3-27b")],
    ids=["gpt-oss-like", "two sizes", "gemma-3-27b"],
)
def test_the_third_prompt_hits_where_the_second_one_branched(made):
    sizes = Sizes(made, retention=0)
    sizes.serve(PROMPT[:3000])
    assert sizes.serve(PROMPT[:1000] + [5] * 2000) == 0
    branch = 1000 // sizes.layout.alignment * sizes.layout.alignment
    assert sizes.serve(PROMPT[:1000] + [6] * 2000) == branch


def test_the_same_with_deepseek_v4_and_mtp_leaves_room_for_the_lookahead():
    sizes = Sizes(find_layout("deepseek-v4"), retention=0)
    sizes.serve(PROMPT[:4000])
    sizes.serve(PROMPT[:1030] + [5] * 2000)
    assert sizes.serve(PROMPT[:1030] + [6] * 2000) == 768


def test_events_name_what_was_stored_now_and_the_parent_in_the_prefix_chain():
    sizes = Sizes(layout(full(16)))
    digests = [sizes.blob(PROMPT[: 16 * (i + 1)])[-32:] for i in range(4)]
    for held in (0, 2):
        sizes.store.put(sizes.scheme.keys(0, 0, range(held, held + 1), sizes.blob(PROMPT[:64])), [((0, 1),)])
    sizes.serve(PROMPT[:64])
    # Object 0 was found by the lookup; 2 was not, so its put answers "already" and it is announced too.
    (event,) = sizes.events
    assert event.parent_hash == digests[0]
    assert event.block_hashes == b"".join(digests[1:])
    assert (event.spec_group, event.object_size) == (0, 16)
    sizes = Sizes(layout(full(64), window(16, 16)))
    sizes.serve(PROMPT[:128])
    events = [event for event in sizes.events if event.spec_group == 1]
    names = [sizes.blob(PROMPT[: 16 * (i + 1)])[-32:] for i in range(8)]
    assert [(event.parent_hash, event.block_hashes) for event in events] == [
        (names[2], names[3]),
        (names[6], names[7]),
    ]
    assert [event.parent_hash for event in sizes.events if event.spec_group == 0] == [b""]
