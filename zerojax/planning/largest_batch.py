"""Search for the largest batch that fits, with few compilations."""

from collections.abc import Callable

PATIENCE = 8  # number of compilations after which bisection replaces interpolation
ROUND_BITS = 5


def largest_that_fits(peak: Callable[[int], float], usable: float, *, start: int) -> int:
    """Return the largest round count whose peak is at most `usable`. `round_down` says which counts are round.

    Peaks are almost linear in round counts. At other counts, peaks jump because the compiler pads. So the next guess
    is where the line through the two peaks nearest to `usable` meets `usable`. The search ends when two neighbouring
    round counts are compiled, and one fits and the other does not.

    `peak` compiles for a count of at least 1, and returns the peak bytes. `start` is the first guess, and need not be
    round. The result is 0 if a count of 1 does not fit.
    """
    peaks: dict[int, float] = {}
    fits, exceeds, guess = 0, None, start
    while exceeds is None or exceeds > next_round(fits):
        peaks[guess] = peak(guess)
        fits, exceeds = (guess, exceeds) if peaks[guess] <= usable else (fits, guess)
        guess = next_guess(peaks, usable, fits, exceeds)
    return fits


def next_guess(peaks: dict[int, float], usable: float, fits: int, exceeds: int | None) -> int:
    """Return a round count above `fits`, and below `exceeds` unless `exceeds` is None."""
    guess = 8 * fits if exceeds is None else (fits + exceeds) // 2
    if 2 <= len(peaks) <= PATIENCE:
        (a, x), (b, y) = sorted(sorted(peaks.items(), key=lambda item: abs(item[1] - usable))[:2])
        guess = int(a + (usable - x) * (b - a) / (y - x)) if y > x else guess
    most = round_down(64 * fits if exceeds is None else exceeds - 1)
    return min(max(round_down(max(guess, 0)), next_round(fits)), max(most, 1))


def round_down(count: int) -> int:
    """Return the largest round count up to `count`. Round counts have at most five significant bits."""
    zeros = max(0, count.bit_length() - ROUND_BITS)
    return count >> zeros << zeros


def next_round(count: int) -> int:
    return round_down(count) + (1 << max(0, count.bit_length() - ROUND_BITS))
