"""The version of this library."""

from importlib import metadata


def version() -> str:
    """Return the installed version, or `"0+source"` if no package is installed."""
    try:
        return metadata.version("zerojax")
    except metadata.PackageNotFoundError:
        return "0+source"
