"""Runs a golden-case file against the planner: ``python -m hybridkv.testing.cases FILE [--json]``.

A file is a JSON list of cases; each names a layout, a prompt and what the planner must answer: kept
``boundaries``, ``save`` and ``lookup`` masks, stepwise saves (``steps``), ``round_trip`` hits, the
boundaries with a ``junction``, and ``presence`` patterns with their ``hit`` and ``load``. Masks are strings
of 0 and 1 or null for "every object".
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridkv.plan.boundaries import check_retention, kept_boundaries
from hybridkv.plan.load import plan_load
from hybridkv.plan.masks import Mask
from hybridkv.plan.presence import longest_hit, lookup_masks
from hybridkv.plan.save import plan_save
from hybridkv.specs.base import CacheSpec
from hybridkv.specs.group import CacheGroup
from hybridkv.specs.layout import Layout
from hybridkv.specs.table import spec_class

Case = dict[str, Any]
Check = tuple[str, object, object]
"""(what is checked, expected, found)"""

_KINDS = {"swa": "sliding_window", "swa_mla": "sliding_window"}


def _spec(group: Case) -> CacheSpec:
    name: str = group["kind"]
    kind = spec_class(_KINDS.get(name, name))
    return kind(**{field.name: group[field.name] for field in fields(kind) if field.name in group})


@dataclass(slots=True)
class Report:
    """How many checks were made and which failed."""

    checks: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, case_id: object, check: Check) -> None:
        """Count a check; keep it when it failed."""
        self.checks += 1
        what, expected, found = check
        if expected != found:
            self.failures.append(f"case {case_id}: {what}: expected {expected}, found {found}")


class _Planned:
    """One case's layout, with its groups in the case's order (equal groups share a spec group)."""

    def __init__(self, case: Case) -> None:
        groups = tuple(
            CacheGroup(name=str(i), spec=_spec(g), lookahead=g["lookahead"])
            for i, g in enumerate(case["groups"])
        )
        self.layout = Layout(name=f"case {case.get('id')}", groups=groups)
        self.spec_group = [0] * len(groups)
        for spec_group in self.layout.spec_groups:
            for member in spec_group.cache_groups:
                self.spec_group[member] = spec_group.index
        self.retention = check_retention(case["retention"], self.layout)
        self.num_tokens: int = case["num_tokens"]

    def per_group(self, masks: list[str | None]) -> list[str | None]:
        return [masks[i] for i in self.spec_group]

    def save(self, start: int, stop: int) -> list[str | None]:
        plans = plan_save(
            self.layout, retention=self.retention, start=start, stop=stop, num_tokens=self.num_tokens
        )
        return self.per_group([_text(plan.mask) for plan in plans])

    def stored(self, shared: int, num_tokens: int) -> list[NDArray[np.bool_]]:
        """What a saved prompt leaves for a prompt of ``num_tokens`` with ``shared`` leading tokens."""
        plans = plan_save(
            self.layout, retention=self.retention, start=0, stop=self.num_tokens, num_tokens=self.num_tokens
        )
        present = []
        for group, plan in zip(self.layout.spec_groups, plans, strict=True):
            held = np.zeros(num_tokens // group.object_size, dtype=np.bool_)
            saved = plan.indices()
            held[saved[saved < min(shared // group.object_size, len(held))]] = True
            present.append(held)
        return present


def _text(mask: Mask) -> str | None:
    return None if mask is None else "".join("01"[int(bit)] for bit in mask)


def _checks(case: Case) -> Iterator[Check]:
    planned = _Planned(case)
    layout, num_tokens = planned.layout, planned.num_tokens
    # Not counted: a layout's alignment is a premise of the case.
    if layout.alignment != case["alignment"]:
        yield "alignment", case["alignment"], layout.alignment
    boundaries = kept_boundaries(layout, planned.retention, num_tokens)
    yield "boundaries", case["boundaries"], boundaries.tolist()
    yield from _mask_checks("save", case["save"], planned.save(0, num_tokens))
    lookup = planned.per_group([_text(mask) for mask in lookup_masks(layout, num_tokens)])
    yield from _mask_checks("lookup", case["lookup"], lookup)
    for step in case["steps"]:
        found = planned.save(step["start"], step["stop"])
        yield from _mask_checks(f"step {step['start']}-{step['stop']}", step["save"], found)
    for trip in case["round_trip"]:
        hit = longest_hit(layout, trip["num_tokens"], planned.stored(trip["shared"], trip["num_tokens"]))
        yield f"round trip {trip}", trip["hit"], hit
    if "junction" in case:
        at = case["junction"]["at"]
        kept = kept_boundaries(layout, planned.retention, num_tokens, junction=at)
        yield f"junction at {at}", case["junction"]["boundaries"], kept.tolist()
    for presence in case["presence"]:
        yield from _presence_checks(planned, presence)


def _mask_checks(what: str, expected: list[str | None], found: list[str | None]) -> Iterator[Check]:
    for idx, pair in enumerate(zip(expected, found, strict=True)):
        yield f"{what}, group {idx}", *pair


def _presence_checks(planned: _Planned, presence: Case) -> Iterator[Check]:
    layout = planned.layout
    present = []
    for group in layout.spec_groups:
        members = [presence["present"][i] for i in group.cache_groups]
        present.append(
            np.array([all(c == "1" for c in bits) for bits in zip(*members, strict=True)], np.bool_)
        )
    hit = longest_hit(layout, planned.num_tokens, present)
    yield f"hit of {presence['present']}", presence["hit"], hit
    if "load" in presence:
        loads = plan_load(layout, hit)
        for idx, expected in enumerate(presence["load"]):
            load = loads[planned.spec_group[idx]]
            found = "".join("01"[i in load] for i in range(len(expected)))
            yield f"load of group {idx} at {hit}", expected, found


def run(path: Path) -> Report:
    """Run every case of a file."""
    report = Report()
    for case in json.loads(path.read_text(encoding="utf-8")):
        for check in _checks(case):
            report.add(case.get("id"), check)
    return report


def main(arguments: list[str]) -> int:
    """Run a file from the command line; return 1 when a check failed, 2 when there is nothing to run."""
    files = [argument for argument in arguments if argument != "--json"]
    if len(files) != 1:
        sys.stderr.write("usage: python -m hybridkv.testing.cases FILE [--json]\n")
        return 2
    try:
        report = run(Path(files[0]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        sys.stderr.write(f"{files[0]}: not a golden-case file: {error!r}\n")
        return 2
    failed, first = len(report.failures), report.failures[:10]
    if "--json" in arguments:
        sys.stdout.write(json.dumps({"checks": report.checks, "failed": failed, "failures": first}) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in first))
        sys.stdout.write(f"{report.checks:,} checks, {failed:,} failed\n")
    if not report.checks:
        sys.stderr.write(f"{files[0]}: holds no case\n")
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
