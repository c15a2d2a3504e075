"""Options of `zero_shard` in one flat dict, as tables of options in tests list them."""

from typing import Any

from zerojax import Tuning


def tuned(**options: Any) -> dict[str, Any]:
    """Return options for `zero_shard` or `estimate`, with those that are fields of `Tuning` put into one."""
    fields = {name: options.pop(name) for name in [*options] if name in Tuning.__dataclass_fields__}
    return options | ({"tuning": Tuning(**fields)} if fields else {})
