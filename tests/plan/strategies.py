"""Random layouts, as hybridkv's objects and as the oracle's plain dicts."""

from hypothesis import strategies as st

from hybridkv.specs.chunked_local import ChunkedLocal
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow

UNIT = 2


@st.composite
def _group(draw, idx):
    block_size = UNIT * draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    lookahead = draw(st.sampled_from([0, 0, 0, 1, 2])) * block_size
    plain = {"size": block_size, "lookahead": lookahead}
    k = 1
    match draw(st.sampled_from(["full", "mla", "window", "window", "chunk", "state"])):
        case "full" | "mla" as kind:
            k = draw(st.sampled_from([1, 1, 2, 4]))
            spec = (Full if kind == "full" else MLA)(block_size=block_size)
            plain |= {"kind": "full", "size": k * block_size}
        case "window":
            window, extra = draw(st.integers(1, 40)), draw(st.sampled_from([0, 0, 3, 9]))
            spec = SlidingWindow(block_size=block_size, window=window, extra=extra)
            plain |= {"kind": "window", "window": window, "extra": extra}
        case "chunk":
            chunk = draw(st.integers(1, 48))
            spec = ChunkedLocal(block_size=block_size, chunk=chunk)
            plain |= {"kind": "chunk", "chunk": chunk}
        case "state":
            spec = Recurrent(block_size=block_size)
            plain |= {"kind": "state"}
    group = CacheGroup(
        name=str(idx), spec=spec, lookahead=lookahead, blocks_per_object=k, shards=4, layer_block_bytes=4
    )
    return group, plain


@st.composite
def layouts(draw):
    """(Layout, the oracle's groups in the order of its spec groups)."""
    pairs = draw(st.integers(1, 4).flatmap(lambda n: st.tuples(*(_group(i) for i in range(n)))).map(list))
    unique, plain = {}, []
    for group, facts in pairs:
        key = (group.spec, group.lookahead)
        if key not in unique:
            unique[key] = group
            plain.append(facts)
    tp = draw(st.sampled_from([1, 1, 2, 4]))
    return Layout(name="random", groups=tuple(unique.values()), hash_unit=UNIT, tp=tp), plain


@st.composite
def retentions(draw, alignment):
    return draw(st.sampled_from(["all", 0, alignment, 2 * alignment, 3 * alignment]))
