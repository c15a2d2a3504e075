"""Tells errors of the wrapped transformation from errors of zerojax, where an update is traced to be analysed.

An analysis traces the transformation with fewer arguments, or in other shapes, than training does. The transformation
may refuse that. Then the analysis finds nothing, and the plan says so. An error of the analysis itself is a bug. It
must not turn into "replicated".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TransformationError(Exception):
    """The wrapped transformation cannot be traced as an analysis asks; `__cause__` is its own error."""


def guarded(update: Callable) -> Callable:
    """Return a function that calls `update` and raises a `TransformationError` for every error inside."""

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return update(*args, **keywords)
        except Exception as error:
            raise TransformationError(f"{type(error).__name__}: {error}") from error

    return call
