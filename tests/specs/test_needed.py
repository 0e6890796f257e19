"""What each kind needs, held against who attends to whom."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.errors import SpecError
from hybridkv.specs.chunked_local import ChunkedLocal
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.specs.table import KINDS, spec_class
from hybridkv.testing.specs import check_spec

SIZES = st.integers(1, 8)

# One spec of each kind; a new kind adds its own.
EXAMPLES = {
    "full": Full(block_size=16),
    "mla": MLA(block_size=16),
    "sliding_window": SlidingWindow(block_size=16, window=100, extra=7),
    "chunked_local": ChunkedLocal(block_size=16, chunk=96),
    "recurrent": Recurrent(block_size=16),
}


def test_full_attention_reads_everything():
    check_spec(SIZES.map(lambda b: Full(block_size=b)), lambda _spec, query, key: key <= query)


def test_mla_reads_everything():
    check_spec(SIZES.map(lambda b: MLA(block_size=b)), lambda _spec, query, key: key <= query)


def test_a_sliding_window_reads_itself_and_what_precedes_it_in_the_window():
    specs = st.builds(
        lambda b, w, x: SlidingWindow(block_size=b, window=w, extra=x),
        SIZES,
        st.integers(1, 40),
        st.integers(0, 9),
    )
    check_spec(specs, lambda spec, query, key: 0 <= query - key < spec.window + spec.extra)


def test_a_chunk_reads_only_itself():
    specs = st.builds(lambda b, c: ChunkedLocal(block_size=b, chunk=c), SIZES, st.integers(1, 40))
    check_spec(specs, lambda spec, query, key: key <= query and key // spec.chunk == query // spec.chunk)


def test_a_recurrent_layer_reads_the_last_state():
    check_spec(
        SIZES.map(lambda b: Recurrent(block_size=b)), lambda _spec, query, key: key in (query, query - 1)
    )


def test_check_spec_catches_a_window_that_is_one_too_short():
    with pytest.raises(AssertionError, match="prefix"):
        check_spec(
            st.just(SlidingWindow(block_size=4, window=7)), lambda _spec, query, key: 0 <= query - key < 8
        )


def test_check_spec_catches_a_kind_that_wrongly_claims_to_be_downward_closed():
    class Wrong(SlidingWindow):
        downward_closed = True

    with pytest.raises(AssertionError, match="downward closed"):
        check_spec(st.just(Wrong(block_size=4, window=7)), lambda _spec, query, key: 0 <= query - key < 7)


@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(1, 10_000), min_size=1), st.integers(0, 64))
def test_many_prefixes_at_once_give_the_same_as_one_by_one(kind, prefixes, lookahead):
    spec = EXAMPLES[kind]
    assert type(spec) is spec_class(kind)
    starts, stops = spec.needed_bounds(np.array(prefixes), lookahead)
    assert [range(a, b) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)] == [
        spec.needed(prefix, lookahead) for prefix in prefixes
    ]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_nothing_is_needed_at_the_start(kind):
    assert not EXAMPLES[kind].needed(0, lookahead=16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Full(block_size=0), "block_size is 0"),
        (lambda: Full(block_size=True), "block_size is True"),
        (lambda: Full(block_size=2.0), "block_size is 2.0"),
        (lambda: SlidingWindow(block_size=4, window=0), "window is 0"),
        (lambda: SlidingWindow(block_size=4, window=4, extra=-1), "extra is -1"),
        (lambda: ChunkedLocal(block_size=4, chunk=0), "chunk is 0"),
        (lambda: spec_class("cross_attention"), "refused.*leave"),
        (lambda: spec_class("slidin_window"), "did you mean 'sliding_window'"),
    ],
)
def test_a_wrong_spec_names_field_and_value(make, message):
    with pytest.raises(SpecError, match=message):
        make()
