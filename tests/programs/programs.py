"""All programs of the registry."""

import equinox_programs  # noqa: F401
import layout_programs  # noqa: F401
import loss_programs  # noqa: F401
from registry import TABLE as TABLE
