"""Load plans: what a resume reads and the device does not hold."""

from hybridkv.errors import ConfigError
from hybridkv.specs.layout import Layout


def plan_load(layout: Layout, hit: int, *, device_prefix: int = 0) -> tuple[range, ...]:
    """Return the objects to load for a hit, one half-open range a spec group.

    The lookahead is matched but never loaded: the engine computes it again. Objects that end at or below
    the device's prefix are left out; one that straddles it is loaded whole.

    Args:
        layout: of the model.
        hit: the boundary to resume at, tokens.
        device_prefix: p0, tokens that the device holds in every group, >= 0.

    Raises:
        ConfigError: the hit lies above the device's prefix and is no boundary.
    """
    if hit < 0 or device_prefix < 0 or (hit % layout.alignment and hit > device_prefix):
        raise ConfigError(f"hit {hit} is no multiple of the alignment {layout.alignment}")
    if hit <= device_prefix:
        return tuple(range(0) for _ in layout.spec_groups)
    loads = []
    for group in layout.spec_groups:
        need = group.needed_objects(hit, 0)
        start = max(need.start, device_prefix // group.object_size)
        loads.append(range(start, max(start, need.stop)))
    return tuple(loads)
