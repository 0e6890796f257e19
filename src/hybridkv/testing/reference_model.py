"""The reference model: a small transformer whose cache *is* the bytes in paged blocks.

A layer reads exactly what its spec's ``needed`` says, out of the bytes in the blocks, and a block that nobody
holds is filled with NaN, so that a late read, a missing load or a wrong block shows in the logits.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv.errors import SpecError
from hybridkv.specs.base import CacheSpec
from hybridkv.specs.full import MLA
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.recurrent import Recurrent

VOCABULARY, HEADS, HEAD_DIM = 61, 2, 8
WIDTH = HEADS * HEAD_DIM
NULL = 0
"""The block that stands for "none" in a block table; never written."""
POISON = 0xFF
"""Every byte of a block that nobody holds: a NaN in every float format."""
RUNNING_STATE = -1
"""The table entry of a state that ends inside a block."""

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
QKV = tuple[Floats, Floats, Floats]
"""Queries, keys and values, each of shape (positions, heads, head_dim)."""


def reference_group(
    name: str, spec: CacheSpec, *, layers: int = 1, lookahead: int = 0, blocks_per_object: int = 1
) -> CacheGroup:
    """Return a cache group with the sizes of the reference model."""
    per_head = HEAD_DIM * (HEAD_DIM if isinstance(spec, Recurrent) else 2 * spec.block_size)
    return CacheGroup(
        name=name,
        spec=spec,
        layers=layers,
        layer_block_bytes=8 * HEADS * per_head,
        shards=1 if isinstance(spec, MLA) else HEADS,
        lookahead=lookahead,
        blocks_per_object=blocks_per_object,
    )


class EngineMemory:
    """The blocks of every cache group, who holds them, and their bytes, which *are* the model's cache.

    A block is float64, so that the sizes of steps do not show, and heads first, so that a rank's part of it
    is contiguous: shape (heads, 2, block_size, head_dim) for keys and values, (heads, head_dim, head_dim) for
    a state. The methods are for the engine's thread.

    Args:
        layout: of the model, groups from ``reference_group``.
        num_blocks: of each group, the null block included.

    Attributes:
        arrays: per group and layer, uint8, shape (num_blocks, layer_block_bytes).
    """

    def __init__(self, layout: Layout, *, num_blocks: int | Sequence[int]) -> None:
        counts = [num_blocks] * len(layout.groups) if isinstance(num_blocks, int) else num_blocks
        for group in layout.groups:
            own = reference_group(group.name, group.spec).layer_block_bytes
            if group.layer_block_bytes != own or not group.prefix_cacheable:
                raise SpecError(f"group {group.name!r} does not fit the reference model; use reference_group")
        self.layout = layout
        self.arrays = tuple(
            tuple(np.full((count, group.layer_block_bytes), POISON, np.uint8) for _ in range(group.layers))
            for group, count in zip(layout.groups, counts, strict=True)
        )
        self._holders = [[0] * count for count in counts]
        self._free = [list(range(count - 1, NULL, -1)) for count in counts]

    def num_free(self, group: int) -> int:
        """Return how many blocks of a group nobody holds."""
        return len(self._free[group])

    def num_holders(self, group: int, block: int) -> int:
        """Return how often a block is held."""
        return self._holders[group][block]

    def allocate(self, group: int) -> int:
        """Return a free block, held once: the one freed last, which a late copy would hit."""
        block = self._free[group].pop()
        self._holders[group][block] = 1
        return block

    def pin(self, group: int, block: int) -> None:
        """Hold a block that somebody holds: it keeps its bytes until all have unpinned it."""
        assert self._holders[group][block], f"group {group}: nobody holds block {block}"
        self._holders[group][block] += 1

    def unpin(self, group: int, block: int) -> None:
        """Give a hold back; the last one frees the block and poisons it."""
        assert self._holders[group][block], f"group {group}: nobody holds block {block}"
        self._holders[group][block] -= 1
        if not self._holders[group][block]:
            self._free[group].append(block)
            for array in self.arrays[group]:
                array[block] = POISON

    def check(self) -> None:
        """Assert that nobody wrote to the null block or to a block that nobody holds."""
        for group, arrays in enumerate(self.arrays):
            for block in (NULL, *self._free[group]):
                clean = all((array[block] == POISON).all() for array in arrays)
                assert clean, f"group {group}: block {block} was written while nobody held it"


class Model:
    """A decoder with random weights: norm, attention or recurrence, MLP, residuals; the groups take turns.

    Attributes:
        layout: of the memory it runs on.
        layers: in order (group, layer within the group, float64 weights by name).
        embedding: shape (vocabulary, width).
        unembedding: shape (width, vocabulary).
    """

    def __init__(self, layout: Layout, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        widths = {"q": WIDTH, "k": WIDTH, "v": WIDTH, "gate": HEADS, "out": WIDTH, "up": WIDTH, "down": WIDTH}
        order = sorted((layer, g) for g, group in enumerate(layout.groups) for layer in range(group.layers))
        self.layout = layout
        self.layers = [
            (group, layer, {name: _draw(rng, (WIDTH, num)) for name, num in widths.items()})
            for layer, group in order
        ]
        self.embedding = rng.normal(size=(VOCABULARY, WIDTH)) / 2
        self.unembedding = rng.normal(size=(WIDTH, VOCABULARY))

    @np.errstate(all="ignore")  # poison is part of the game
    def forward(
        self, memory: EngineMemory, tokens: Sequence[int], span: range, tables: Sequence[Mapping[int, int]]
    ) -> Floats:
        """Compute the positions of ``span`` and return the logits of the last, shape (vocabulary,)."""
        x = self.embedding[np.array(tokens[span.start : span.stop])]
        for group, layer, weights in self.layers:
            spec, array = self.layout.groups[group].spec, memory.arrays[group][layer]
            h = _norm(x)
            q, k, v = (np.reshape(h @ weights[name], (-1, HEADS, HEAD_DIM)) for name in "qkv")
            if isinstance(spec, Recurrent):
                decay = 1 / (1 + np.exp(-3 - h @ weights["gate"]))
                mixed = _recur(spec, array, tables[group], span, (q, k, v), decay=decay)
            else:
                qkv = (_rotate(q, span), _rotate(k, span), v)
                mixed = _attend(spec, array, tables[group], span, qkv)
            x = x + _norm(mixed.reshape(x.shape)) @ weights["out"]
            x = x + np.tanh(_norm(x) @ weights["up"]) @ weights["down"]
        logits: Floats = _norm(x[-1]) @ self.unembedding
        return logits


def _draw(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return rng.normal(size=shape) / math.sqrt(shape[0])


def _norm(x: Floats) -> Floats:
    normed: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return normed


def _rotate(x: Floats, span: range) -> Floats:
    """Turn pairs of numbers by the position (rotary embedding, arXiv:2104.09864)."""
    angle = np.outer(span, 30.0 ** -np.linspace(0, 1, HEAD_DIM // 2))[:, None]
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)


def _attend(spec: CacheSpec, array: Bytes, table: Mapping[int, int], span: range, qkv: QKV) -> Floats:
    """Write the new keys and values to blocks, then read from blocks all that the queries need."""
    (q, k, v), cache = qkv, array.view(np.float64).reshape(-1, HEADS, 2, spec.block_size, HEAD_DIM)
    queries = np.arange(span.start, span.stop)
    oldest = np.maximum(spec.oldest_needed(queries), 0)
    read = np.arange(oldest[0], span.stop)
    slots = read % spec.block_size
    blocks = np.array([table.get(idx, NULL) for idx in (read // spec.block_size).tolist()])
    new = slice(-len(span), None)
    assert blocks[new].all(), "the engine writes to the null block"
    cache[blocks[new], :, 0, slots[new]] = k
    cache[blocks[new], :, 1, slots[new]] = v
    seen = (oldest[:, None] <= read) & (read <= queries[:, None])
    # Not divided by sqrt(head_dim): random weights look at single tokens only when attention is sharp.
    scores = np.where(seen, np.einsum("qhd,khd->hqk", q, cache[blocks, :, 0, slots]), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Floats = np.einsum("hqk,khd->qhd", weights, cache[blocks, :, 1, slots])
    return mixed


def _recur(
    spec: CacheSpec, array: Bytes, table: Mapping[int, int], span: range, qkv: QKV, *, decay: Floats
) -> Floats:
    """Take the state of the last step's end, add every position to it, write it where this step ends."""
    (q, k, v), cache = qkv, array.view(np.float64).reshape(-1, HEADS, HEAD_DIM, HEAD_DIM)
    old = cache[table.get(state_entry(spec, span.start), NULL)] if span.start else np.zeros(cache.shape[1:])
    state, mixed = old, np.empty_like(q)
    for i in range(len(span)):
        state = decay[i, :, None, None] * state + k[i, :, :, None] * v[i, :, None, :]
        mixed[i] = np.einsum("hd,hde->he", q[i], state)
    cache[table[state_entry(spec, span.stop)]] = state
    return mixed


def state_entry(spec: CacheSpec, computed: int) -> int:
    """Return the table entry of the state after ``computed`` tokens."""
    return RUNNING_STATE if computed % spec.block_size else computed // spec.block_size - 1
