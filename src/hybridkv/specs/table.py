"""The kinds of attention that hybridkv knows, by name: a new kind is one row here."""

from hybridkv.errors import SpecError
from hybridkv.specs.base import CacheSpec
from hybridkv.specs.chunked_local import ChunkedLocal
from hybridkv.specs.full import MLA, Full
from hybridkv.specs.recurrent import Recurrent
from hybridkv.specs.sliding_window import SlidingWindow
from hybridkv.suggest import nearest

KINDS: dict[str, type[CacheSpec]] = {
    spec.kind: spec for spec in (Full, MLA, SlidingWindow, ChunkedLocal, Recurrent)
}

REFUSED: dict[str, str] = {
    "cross_attention": "its keys come from another input than the prompt, so a prompt prefix does not name "
    "them; leave the model's cross-attention groups out or serve it without hybridkv",
}


def spec_class(kind: str) -> type[CacheSpec]:
    """Return the spec class of a kind.

    Raises:
        SpecError: the kind is unknown or refused; the message says why.
    """
    if kind in REFUSED:
        raise SpecError(f"kind {kind!r} is refused: {REFUSED[kind]}")
    if kind not in KINDS:
        raise SpecError(f"kind {kind!r} is unknown{nearest(kind, KINDS)}; known: {', '.join(sorted(KINDS))}")
    return KINDS[kind]
