"""A brute-force planner that enumerates the definitions token by token; it shares no code with hybridkv.

It speaks of groups as plain dicts: kind, size (tokens of an object), lookahead and the kind's own sizes.
"""

from math import lcm


def reads(group, query):
    """Positions whose KV (or, for a recurrent group, whose state) the query at ``query`` reads, below it."""
    match group["kind"]:
        case "full":
            return set(range(query))
        case "window":
            # The query sees `window` positions, itself included; the engine prefills `extra` more below.
            seen = [query - i for i in range(group["window"] + group["extra"])]
            return {position for position in seen if 0 <= position < query}
        case "chunk":
            return {
                position for position in range(query) if position // group["chunk"] == query // group["chunk"]
            }
        case "state":
            return {query - 1} if query else set()
    raise AssertionError(group)


def needs(group, prefix, lookahead):
    if prefix == 0:
        return set()
    wanted = reads(group, prefix)
    if group["kind"] != "state":
        wanted |= set(range(prefix, prefix + lookahead))
    return wanted


def objects(group, prefix, lookahead):
    return {position // group["size"] for position in needs(group, prefix, lookahead)}


def alignment(groups):
    return lcm(*(group["size"] for group in groups))


def candidates(groups, num_tokens):
    found = []
    for prefix in range(alignment(groups), num_tokens + 1, alignment(groups)):
        complete = [
            all((i + 1) * group["size"] <= num_tokens for i in objects(group, prefix, group["lookahead"]))
            for group in groups
        ]
        if all(complete):
            found.append(prefix)
    return found


def kept(groups, retention, num_tokens, junction=0):
    possible = candidates(groups, num_tokens)
    wanted = set()
    for boundary in possible:
        if retention == "all" or (retention and boundary % retention == 0):
            wanted.add(boundary)
    resend = max((b for b in possible if b <= num_tokens - 1), default=0)
    wanted |= {max(possible, default=0), resend, resend - alignment(groups)}
    wanted.add(max(candidates(groups, min(junction, num_tokens)), default=0))
    return sorted(b for b in wanted if b > 0)


def saved(groups, retention, num_tokens, junction=0):
    """Per group the set of objects to save of a finished prompt."""
    boundaries = kept(groups, retention, num_tokens, junction)
    result = []
    for group in groups:
        complete = set(range(num_tokens // group["size"]))
        if group["kind"] == "full":
            result.append(complete)
        else:
            wanted = set().union(*(objects(group, b, group["lookahead"]) for b in boundaries))
            result.append(wanted & complete)
    return result


def hit(groups, num_tokens, present):
    """Longest legal prefix; ``present`` is a set of objects per group."""
    legal = [
        prefix
        for prefix in candidates(groups, num_tokens)
        if prefix < num_tokens
        and all(
            objects(group, prefix, group["lookahead"]) <= held
            for group, held in zip(groups, present, strict=True)
        )
    ]
    return max(legal, default=0)
