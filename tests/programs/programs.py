"""All programs of the registry."""

import equinox_programs  # noqa: F401
import layout_programs  # noqa: F401
import loss_programs  # noqa: F401
import published_networks  # noqa: F401
import published_objectives  # noqa: F401
import published_programs  # noqa: F401
from registry import TABLE as TABLE

PUBLISHED = {name: program for name, program in TABLE.items() if program.kind == "Published"}
LAYOUTS = {name: program for name, program in TABLE.items() if name not in PUBLISHED}
