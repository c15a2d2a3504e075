"""Keep compiled programs on disk, so that restarted runs and other processes do not compile them again."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from zerojax.units import parse_bytes

__all__ = ["cache_compilations"]


def cache_compilations(folder: str | os.PathLike, *, max_bytes: float | str | None = None) -> None:
    """Keep all programs that JAX compiles from now on in a folder, and read them from there.

    This sets up JAX's persistent compilation cache. By default, JAX keeps only programs that took a second to compile.
    A run consists of many programs, so the second start of a run would still compile most of them. With this function,
    the second start compiles none. With several processes, process 0 writes the folder, and all processes read it. On
    CPUs, JAX keeps only the programs of process 0.

    A changed program, option, JAX version or kind of device has its own entries. Call this function before the first
    program, on every process, with a folder that all of them see. Do not share a folder between hosts with different
    CPUs.

    Args:
        folder: The folder. It and its parents are made if they do not exist.
        max_bytes: The size of the folder, such as `"20 GB"`. The entries that were not used for the longest time are
            removed first. None: entries are never removed.

    Raises:
        ValueError: If `folder` is empty, or `max_bytes` is no size of at least 1 byte.
        OSError: If the folder cannot be made.
    """
    if not os.fspath(folder):
        raise ValueError(
            'cache_compilations("") names no folder. Give one, such as "~/.cache/jax", or "." for this one.'
        )
    size = -1 if max_bytes is None else parse_bytes("cache_compilations(max_bytes=)", max_bytes, least=1)
    path = Path(folder).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    compilation_cache.reset_cache()  # JAX keeps the first folder otherwise
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # no least size
    jax.config.update("jax_compilation_cache_max_size", size)
