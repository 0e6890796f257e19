"""How the scheduler side decides."""

from dataclasses import dataclass

from hybridkv.errors import ConfigError
from hybridkv.plan.boundaries import Retention, check_retention
from hybridkv.specs.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How the scheduler side decides.

    Attributes:
        retention: which boundaries are kept.
        lookup_timeout_s: longest lookup; then the best proven boundary is the hit. ``None`` = no limit.
        answer_s: how long the answer of ``ask`` is good for a request that has not started yet, seconds.
        least_load_tokens: a hit that adds fewer tokens to the device's prefix is not worth loading.
        least_save_tokens: shorter prompts are not saved.
        load_tries: failed loads of a request after which it computes instead, >= 1.
        save_tries: failed saves of an object after which a request leaves it, 1 to 255.
        pinned_blocks: saves are planned while all jobs, loads included, hold no more blocks than this; what
            does not fit is left to later steps. Loads are never held back.
        known_objects: objects whose being stored is remembered at most.
        known_s: how long a save or load that showed objects to be stored is trusted at most, seconds; then
            a request that holds them on the device asks the store again, to repair what it has lost.
    """

    retention: Retention = "all"
    lookup_timeout_s: float | None = 1.0
    answer_s: float = 10.0
    least_load_tokens: int = 1
    least_save_tokens: int = 1
    load_tries: int = 3
    save_tries: int = 3
    pinned_blocks: int = 1 << 16
    known_objects: int = 1 << 18
    known_s: float = 300.0

    def check(self, layout: Layout) -> None:
        """Refuse settings that cannot work with a layout.

        Raises:
            ConfigError: the retention does not fit the layout, ``pinned_blocks`` has no room for two objects,
                or a number of tries is out of range.
        """
        check_retention(self.retention, layout)
        largest = max(len(group.cache_groups) * group.blocks_per_object for group in layout.spec_groups)
        if self.pinned_blocks < 2 * largest:
            raise ConfigError(
                f"pinned_blocks is {self.pinned_blocks}, and one object of {layout.name} has up to {largest} "
                f"blocks; give at least {2 * largest}, or the engine more blocks"
            )
        if self.load_tries < 1 or not 1 <= self.save_tries <= 255:
            raise ConfigError(
                f"load_tries is {self.load_tries} and save_tries {self.save_tries}; give 1 to 255"
            )
