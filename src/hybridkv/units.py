"""Byte counts as people write them: ``2GiB``, ``1.5GB``, ``4096``."""

import re
from fractions import Fraction

from hybridkv.errors import ConfigError

MAX_BYTES = 2**63 - 1
"""Largest byte count that is accepted, in bytes."""

_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"(?P<number>[0-9]{1,19}(?:\.[0-9]{1,19})?)(?: ?(?P<unit>[A-Za-z]+))?")


def parse_bytes(text: str) -> int:
    """Return the bytes that a text such as ``2GiB`` means, rounded down.

    Args:
        text: a decimal number without sign and a unit: KiB, MiB, GiB, TiB count in 1024s, kB, MB, GB, TB in
            1000s, B or nothing means bytes. Units keep their case: Gb would be bits.

    Raises:
        ConfigError: the text is no size, its unit is unknown, or it is not in [1, 2**63 - 1] bytes.

    Example:
        >>> parse_bytes("1.5GB"), parse_bytes("64MiB"), parse_bytes("4096")
        (1500000000, 67108864, 4096)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"size {text!r} is not a plain number and a unit; write it like '2GiB' or '4096'")
    factor = _UNITS.get(match["unit"] or "B")
    if factor is None:
        raise ConfigError(f"size {text!r} has an unknown unit; known are {', '.join(_UNITS)}")
    num_bytes = int(Fraction(match["number"]) * factor)
    if not 1 <= num_bytes <= MAX_BYTES:
        raise ConfigError(f"size {text!r} is {num_bytes} bytes, which is not in [1, {MAX_BYTES}]")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Return a byte count in the largest fitting 1024-based unit, rounded to two decimals.

    ``parse_bytes`` reads the text back: exactly when nothing was rounded, else to within 0.5 %
    and, as it rounds down, a byte.

    Args:
        num_bytes: bytes, >= 0.

    Example:
        >>> format_bytes(2**31), format_bytes(1_600_000), format_bytes(0)
        ('2GiB', '1.53MiB', '0B')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    unit = next((name for name in units if round(num_bytes / _UNITS[name], 2) < 1024), "TiB")
    return f"{num_bytes / _UNITS[unit]:.2f}".rstrip("0").rstrip(".") + unit
