"""Bytes and seconds as text: three digits and a unit."""

UNITS = ("B", "kB", "MB", "GB", "TB")


def byte_unit(count: float) -> tuple[str, float]:
    """Return the largest decimal unit in which a size, rounded to three digits, is at least 1, and the unit's bytes."""
    power = next((i for i in range(len(UNITS)) if count < 999.5 * 1000**i), len(UNITS) - 1)
    return UNITS[power], 1000.0**power


def format_bytes(count: float | None) -> str:
    """Return a size as `1.88 GB`, in decimal units, or a dash if it is unknown."""
    if count is None:
        return "-"
    unit, size = byte_unit(count)
    return f"{count:.0f} B" if unit == "B" else f"{count / size:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a time as `4.05 ms`."""
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("us", 1e-6)
    return f"{seconds / size:.3g} {unit}"
