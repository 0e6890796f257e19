"""The conformance check of a kind of attention: ``check_spec``.

Give it a strategy of specs and a predicate that says who attends to whom; the two share no code.
"""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.specs.base import CacheSpec


def check_spec(
    make: st.SearchStrategy[CacheSpec], attends: Callable[[CacheSpec, int, int], bool], *, longest: int = 120
) -> None:
    """Check a kind's rule against who attends to whom.

    Args:
        make: specs of the kind.
        attends: ``attends(spec, query, key)`` tells whether the query at position ``query`` reads what is
            cached for position ``key``; asked for keys <= query.
        longest: largest prefix that is tried, tokens.

    Raises:
        AssertionError: the rule needs other positions than the predicate names, or the needs break the law
            that what a larger prefix needs below a smaller one, the smaller one needs too.
    """

    @given(make, st.integers(1, longest), st.integers(0, longest), st.integers(0, 32))
    def check(spec: CacheSpec, prefix: int, further: int, lookahead: int) -> None:
        needed = set(spec.needed(prefix))
        read = {key for key in range(prefix) if attends(spec, prefix, key)}
        assert needed == read, f"prefix {prefix} of {spec}: needs {needed}, reads {read}"
        widened = set(spec.needed(prefix, lookahead))
        ahead = set(range(prefix, prefix + lookahead)) if spec.widened_by_lookahead else set()
        assert widened == needed | ahead, f"prefix {prefix} of {spec} with lookahead {lookahead}: {widened}"
        later = {key for key in spec.needed(prefix + further) if key < prefix}
        assert later <= needed, f"prefix {prefix + further} of {spec} needs {later - needed} below {prefix}"
        if spec.downward_closed:
            everything = set(range(prefix))
            assert needed == everything, f"{spec} is not downward closed: prefix {prefix} needs {needed}"

    check()
