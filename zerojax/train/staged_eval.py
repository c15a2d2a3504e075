"""Call a function of parameters on disk, such as an evaluation. It runs in stages, without a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.core

from zerojax.config import Config
from zerojax.gather.engine import split_arrays
from zerojax.layout.chunked import is_chunked
from zerojax.layout.tree import layout_of
from zerojax.placement.storage import leaves_of, storage_leaves
from zerojax.staged.microbatch import Microbatch, Reader
from zerojax.staged.sources import OnDisk
from zerojax.staged.state import files_of, shapes_on_disk
from zerojax.train.staged_loss import Traced, trace_stages, type_key
from zerojax.train.view import View

if TYPE_CHECKING:
    from jaxtyping import PyTree


class StagedFunction:
    """A function of logical parameters and a batch. Each call reads the parameters from disk, stage by stage."""

    def __init__(self, config: Config, function: Any):
        """Store the arguments. `function` has a method `call`, like a `Loss`, and is traced by the first call."""
        self._config, self._function = config, function
        self._traced: dict[Any, Traced] = {}
        self._on_devices: Callable = jax.jit(lambda *inputs: inputs)

    def __call__(self, params: PyTree, batch: PyTree, args: tuple) -> Any:
        """Call the function and return its result."""
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, batch, args))):
            raise TypeError(
                "An eval step of parameters on disk was called inside of jax.jit or another transformation. It runs "
                "many programs, between which Python reads files, so JAX cannot trace it. Call it from Python, for "
                "example once per token of a text."
            )
        files = files_of(params)
        assert files is not None
        layout = layout_of(self._config, shapes_on_disk(params))
        leaves = leaves_of(params)
        files.require(*next(x for x in leaves if is_chunked(x)).chunks)
        kept = {i: OnDisk(i, x.leaf, x.chunking, x.sharding) for i, x in enumerate(leaves) if is_chunked(x)}
        stored = {
            i: storage_leaves([x], [leaf])[0].astype(leaf.dtype)
            for i, (x, leaf) in enumerate(zip(leaves, layout.params, strict=True))
            if i not in kept
        }
        inputs = self._on_devices(None, batch, *args)
        view = View(self._config, layout, (), self._function, 1)
        key = layout, tuple(of.leaf.dtype for of in kept.values()), type_key(inputs)
        if key not in self._traced:
            self._traced[key] = trace_stages(view, kept, stored, inputs)
        found = self._traced[key]
        arrays, _ = split_arrays(inputs)
        given = stored | dict(enumerate([*arrays, *found.consts], len(leaves)))
        reader = Reader(files, found.staged.reads)
        try:
            outs = Microbatch(found.staged, reader, view.comm, self._config.mesh, None).forward(given)
        finally:
            reader.close()
        return jax.tree.unflatten(found.structure, outs)
