"""The search for the largest batch that fits, with few compilations."""

from collections.abc import Callable

PATIENCE = 8  # compilations after which interpolation is given up for bisection
ROUND_BITS = 5


def largest_that_fits(peak: Callable[[int], float], usable: float, *, start: int) -> int:
    """Return the largest round count whose peak is at most `usable`.

    Peaks are almost linear over round counts; over others they jump, as the compiler pads.
    So the next guess is where the line through the two peaks nearest to the limit meets it.
    The search ends at two neighbours of which one fits and one does not, both compiled.

    Args:
        peak: Bytes for a count of at least 1; costs a compilation.
        usable: Bytes.
        start: The first guess; at least 1, need not be round.

    Returns:
        The count; 0 if even 1 does not fit.
    """
    peaks: dict[int, float] = {}
    fits, exceeds, guess = 0, None, start
    while exceeds is None or exceeds > next_round(fits):
        peaks[guess] = peak(guess)
        fits, exceeds = (guess, exceeds) if peaks[guess] <= usable else (fits, guess)
        guess = next_guess(peaks, usable, fits, exceeds)
    return fits


def next_guess(peaks: dict[int, float], usable: float, fits: int, exceeds: int | None) -> int:
    """Return a round count between one that fits and one that does not, if one that does not is known."""
    guess = 8 * fits if exceeds is None else (fits + exceeds) // 2
    if 2 <= len(peaks) <= PATIENCE:
        (a, x), (b, y) = sorted(sorted(peaks.items(), key=lambda item: abs(item[1] - usable))[:2])
        guess = int(a + (usable - x) * (b - a) / (y - x)) if y > x else guess
    most = round_down(64 * fits if exceeds is None else exceeds - 1)
    return min(max(round_down(max(guess, 0)), next_round(fits)), max(most, 1))


def round_down(count: int) -> int:
    """Return the largest round count up to `count`. Round counts have five significant bits."""
    zeros = max(0, count.bit_length() - ROUND_BITS)
    return count >> zeros << zeros


def next_round(count: int) -> int:
    """Return the smallest round count above `count`."""
    return round_down(count) + (1 << max(0, count.bit_length() - ROUND_BITS))
