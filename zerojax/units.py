"""Format bytes, FLOPs and seconds as text with three digits and a unit, and parse sizes."""

import math
import numbers
import re

UNITS = ("B", "kB", "MB", "GB", "TB")


def byte_unit(count: float) -> tuple[str, float]:
    """Return the largest unit in which `count`, rounded to three digits, is at least 1, and the bytes per unit."""
    power = next((i for i in range(len(UNITS)) if count < 999.5 * 1000**i), len(UNITS) - 1)
    return UNITS[power], 1000.0**power


def format_bytes(count: float | None) -> str:
    """Return a size as text such as `1.88 GB`, in decimal units, or a dash for None."""
    if count is None:
        return "-"
    unit, size = byte_unit(count)
    return f"{count:.0f} B" if unit == "B" else f"{count / size:.3g} {unit}"


def format_flops(count: float) -> str:
    """Return a number of FLOPs as text such as `1.88 GFLOP`."""
    return format_bytes(count).replace("B", "FLOP")


def format_seconds(seconds: float) -> str:
    """Return a time as text such as `4.05 ms`."""
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("us", 1e-6)
    return f"{seconds / size:.3g} {unit}"


_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([kKMGT]?)(i?)B?\s*")


def parse_bytes(argument: str, given: float | str, *, least: int = 0) -> int:
    """Return the number of bytes for a size such as `72e9`, `"72 GB"` or `"1 GiB"`.

    Args:
        argument: The name of the caller's argument, for error messages.
        given: A number of bytes, or a number with a unit: B, kB, MB, GB, TB (powers of 1,000), KiB, MiB, GiB, TiB
            (powers of 1,024).
        least: The fewest bytes allowed.

    Raises:
        TypeError: If `given` is neither a number nor text.
        ValueError: If the text is not a size, or the number is below `least` or not finite.
    """
    if isinstance(given, bool) or not isinstance(given, numbers.Real | str):
        raise TypeError(f'{argument} is a number of bytes or a size such as "1 GiB", not {given!r}.')
    if isinstance(given, str):
        found = _SIZE.fullmatch(given)
        power = " kMGT".index(found[2].replace("K", "k") or " ") if found else 0
        count = float(found[1]) * (1024 if found[3] else 1000) ** power if found else math.nan
    else:
        count = given
    if not least <= count < math.inf:
        raise ValueError(
            f"{argument}={given!r} is no size of at least {least} bytes. Give a number of bytes, or a number with a "
            f'unit, such as "500 MB", "1 GiB" or "72 GB".'
        )
    return int(count)
