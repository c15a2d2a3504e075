"""Compute the memory that a compiled program takes on one device."""

from typing import Any


def memory_analysis(compiled: Any) -> Any:
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory


def peak_bytes(compiled: Any) -> int:
    """Return the bytes per device of arguments, results that do not alias donated arguments, and temporary memory."""
    memory = memory_analysis(compiled)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
