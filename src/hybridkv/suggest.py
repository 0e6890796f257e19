"""The nearest known name, for error messages."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or an empty string.

    Example:
        >>> nearest("windw", ["window", "chunk"])
        "; did you mean 'window'?"
    """
    match = get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""
