"""The memory a compiled program takes on one device, by XLA's own account."""

from typing import Any


def memory_analysis(compiled: Any) -> Any:
    """Return `compiled.memory_analysis()`, which every supported backend gives."""
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory


def peak_bytes(compiled: Any) -> int:
    """Return bytes per device: arguments, results that do not alias donated arguments, and temporary memory."""
    memory = memory_analysis(compiled)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
