"""Prove that the programs of a Pallas kernel use only their own rows, and divide the kernel over the devices.

A Pallas kernel runs one program per index of a grid. A block map says which block of each array a program reads or
writes. Suppose that along one dim of the grid, program i uses only block i of every result and of every operand whose
blocks depend on i, and does not read the number i itself. Then the programs of one range of i compute one range of the
results from one range of the operands. So each device can run its own range.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zerojax import compat, jaxprs
from zerojax.dims.place import Place, RowDims


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """How one device runs a Pallas call on its own rows."""

    params: dict[str, Any]  # the parameters of the equation for one device
    # for each operand, the dim that the devices divide, or None for an operand that all devices need whole
    dims: tuple[int | None, ...]
    out_dims: tuple[int, ...]  # the same for each result; all results are divided


def own_rows(eqn: Any, row_dims: Sequence[RowDims], workers: int) -> OwnRows | None:
    """Divide a Pallas call over the workers, along a dim of its grid whose programs use only their own rows.

    Return None if there is no proof, or if no operand holds the rows of the batch along such a dim.
    """
    if workers == 1 or eqn.primitive.name != "pallas_call":
        return None
    grid = eqn.params["grid_mapping"]
    if grid.get_grid_indices or eqn.params.get("mesh") is not None or not all(isinstance(n, int) for n in grid.grid):
        return None
    body, _ = compat.opened(eqn.params["jaxpr"])
    asks = [inner for inner in jaxprs.equations(body) if inner.primitive.name in ("program_id", "num_programs")]
    asked = {inner.params["axis"] for inner in asks}
    seen = [axis for axis in range(len(grid.grid)) if axis not in grid.vmapped_dims]  # as the body numbers them
    declared = getattr(eqn.params["compiler_params"], "dimension_semantics", None) or ()
    parallel = {axis for axis, kind in zip(seen, declared, strict=False) if kind == "parallel"} | {*grid.vmapped_dims}
    for axis, programs in enumerate(grid.grid):
        if programs % workers or (axis in seen and seen.index(axis) in asked):
            continue
        if grid.scratch_avals and axis not in parallel:
            continue
        dims = [_divided_dim(mapping, axis, programs) for mapping in grid.block_mappings]
        given = [None] * grid.num_index_operands + dims[: grid.num_inputs]  # all programs read the index operands
        results = dims[grid.num_inputs :]
        aliased = [given[i] == results[j] for i, j in eqn.params["input_output_aliases"]]
        if "mixed" in dims or None in results or not all(aliased) or not _have_rows(given, row_dims):
            continue
        return OwnRows(_local(eqn, axis, dims, workers), tuple(given), tuple(results))
    return None


def _have_rows(dims: Sequence[int | None], row_dims: Sequence[RowDims]) -> bool:
    pairs = zip(dims, row_dims, strict=True)
    return any(rows is not None and Place(dim) in rows.places for dim, rows in pairs if dim is not None)


def _divided_dim(mapping: Any, axis: int, programs: int) -> Any:
    """Return the dim of an array along which program i uses block i. The programs are counted along the grid's `axis`.

    Return None if the blocks do not depend on i. Return "mixed" if program i uses a block other than block i, or if
    the blocks do not fill the dim exactly.
    """
    jaxpr, _ = compat.opened(mapping.index_map_jaxpr)
    index = jaxpr.invars[axis]
    depends = jaxprs.dependent_on([index], jaxpr.eqns)
    dims = [d for d, atom in enumerate(jaxpr.outvars) if not compat.is_literal(atom) and atom in depends]
    if not dims:
        return None
    size = _block_size(mapping.block_shape[dims[0]])
    if len(dims) > 1 or jaxpr.outvars[dims[0]] is not index or mapping.transforms or size is None:
        return "mixed"
    return dims[0] if mapping.array_aval.shape[dims[0]] == size * programs else "mixed"


def _block_size(block: Any) -> int | None:
    """Return the size of a block along one dim, or None if the block map returns element indices, not block numbers."""
    from jax.experimental import pallas

    if block is None or isinstance(block, pallas.Squeezed):
        return 1
    if isinstance(block, int):
        return block
    return block.block_size if isinstance(block, pallas.Blocked) else None


def _local(eqn: Any, axis: int, dims: Sequence[int | None], workers: int) -> dict[str, Any]:
    part = lambda aval, dim: (
        aval
        if dim is None
        else aval.update(shape=tuple(n // workers if d == dim else n for d, n in enumerate(aval.shape)))
    )
    grid = eqn.params["grid_mapping"]
    mappings = tuple(
        dataclasses.replace(mapping, array_aval=part(mapping.array_aval, dim))
        for mapping, dim in zip(grid.block_mappings, dims, strict=True)
    )
    programs = tuple(n // workers if i == axis else n for i, n in enumerate(grid.grid))
    results = zip(eqn.params["out_avals"], dims[grid.num_inputs :], strict=True)
    return {
        **eqn.params,
        "grid_mapping": dataclasses.replace(grid, grid=programs, block_mappings=mappings),
        "out_avals": tuple(part(aval, dim) for aval, dim in results),
    }
