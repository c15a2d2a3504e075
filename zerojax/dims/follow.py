"""Find the `RowDims` of each value in a jaxpr and its calls, loops and branches.

The engine and `comm.partial_sums` follow the rows of a batch. For them, a wrong dim costs time, but the gradients stay
right, because a sum is the same whichever dim is divided. So their `Follower` guesses where the rules give up. Other
code, such as `optim.owned`, follows the sharded dim of a parameter and needs a proof. Its `Follower` does not guess.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from zerojax import compat, jaxprs
from zerojax.dims import moves
from zerojax.dims.place import NOWHERE, UNKNOWN, Context, RowDims, is_index, on_dim, row_dims_of
from zerojax.primitives import Kind

_HAVE_BODIES = (Kind.CALL, Kind.REMAT, Kind.CUSTOM, Kind.CONTROL)


class Follower:
    """Finds the followed dim in the values of jaxprs. Each analysis makes one instance, which caches results.

    Attributes:
        count: The size of the followed dim, or a divisor of the size, such as the number of devices that share the dim.
        guesses: Whether unknown row dims are replaced by a guess from shapes and shardings.
        axes: The mesh axes that divide the followed dim. Only a `Follower` that guesses reads them.
        undivided: By source line, equations that have a large operand with rows, and that the compiler cannot divide.
            The engine warns about them. Only a `Follower` that guesses collects them.
    """

    def __init__(self, count: int, *, guesses: bool = False, axes: Collection[str] = ()):
        self.count, self.guesses, self.axes = count, guesses, frozenset(axes)
        self.undivided: dict[str, Any] = {}
        self._results: dict[Any, tuple[Any, list[RowDims]]] = {}

    def row_dims(self, jaxpr: Any, given: Sequence[RowDims]) -> dict[Any, RowDims]:
        return self._followed(jaxpr, given)[0]

    def _followed(
        self, jaxpr: Any, given: Sequence[RowDims], drawn: Collection = ()
    ) -> tuple[dict[Any, RowDims], Context]:
        """Return the row dims and the rules' context, assuming that dim 0 of the variables in `drawn` holds rows."""
        found: dict[Any, RowDims] = dict.fromkeys(compat.constvars_of(jaxpr), NOWHERE)
        found.update(zip(jaxpr.invars, given, strict=True))
        made: dict[Any, Any] = {}
        context = Context(self.count, made, _known(jaxpr.invars, given), self.axes)
        for eqn in jaxpr.eqns:
            row_dims = row_dims_of(eqn.invars, found)
            for var, rows in zip(eqn.outvars, self.through(eqn, row_dims, context), strict=True):
                shape = getattr(var.aval, "shape", None)
                is_bare = shape == () or 0 in (shape or ())  # a scalar or an empty array cannot have one entry per row
                found[var] = NOWHERE if rows is None and is_bare else rows
                found[var] = on_dim(0) if var in drawn else found[var]
                made[var] = eqn
        if self.guesses and not drawn and (drawn := _drawn(jaxpr, given, found)):
            again, context = self._followed(jaxpr, given, drawn)
            # The assumption must not change known places: a size may equal the number of rows by chance.
            known = [(rows, again[var]) for var, rows in found.items() if rows is not None and rows.places]
            if all(new is not None and new.places == rows.places for rows, new in known):
                return again, context
        return found, context

    def with_implied(self, jaxpr: Any, found: Mapping[Any, RowDims]) -> dict[Any, RowDims]:
        """Add places to a value that has none, if elementwise operations combine it with a value that has places.

        Examples are noise and learned positions with one entry per row. They do not depend on the batch, but their
        cotangents hold rows. `found` is the result of `row_dims`.
        """
        implied = dict(found)
        for eqn in reversed(jaxpr.eqns):
            if compat.name_of(eqn) not in moves.IMPLIES:
                continue
            rows = implied[eqn.outvars[0]]
            if rows is None or not rows.places:
                continue
            for atom in jaxprs.variables_in(eqn.invars):
                given = implied[atom]
                if given is not None and not given.places and atom.aval.shape:
                    implied[atom] = moves.implied(eqn, rows, atom, given)
        return implied

    def results(self, jaxpr: Any, given: Sequence[RowDims]) -> list[RowDims]:
        key = id(jaxpr), tuple(given)
        if key not in self._results:
            found, context = self._followed(jaxpr, given)
            results = _noted(jaxpr.outvars, row_dims_of(jaxpr.outvars, found), context)
            self._results[key] = jaxpr, results  # The jaxpr is kept, so that no other jaxpr gets its id.
        return self._results[key][1]

    def through(self, eqn: Any, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
        if (rule := self._rule(eqn, row_dims)) is not None:
            found = rule(eqn, row_dims, context)
            found = found if isinstance(found, list) else [found] * len(eqn.outvars)
        else:
            found = self._inside(eqn, _noted(eqn.invars, row_dims, context))
        if self.guesses and UNKNOWN in found:
            from zerojax.dims import guess

            return guess.guessed(eqn, row_dims, found, context)
        return found

    def _rule(self, eqn: Any, row_dims: Sequence[RowDims]) -> moves.PlaceRule | None:
        name = compat.name_of(eqn)
        if name in moves.RULES or jaxprs.facts(eqn).kind in _HAVE_BODIES:
            return moves.RULES.get(name)
        from zerojax.dims import guess, indexing, mixing

        if self.guesses and self.count > 1 and guess.is_undivided(eqn, row_dims, self.count):
            self.undivided.setdefault(compat.line_of(eqn), eqn)
        if self.guesses and name == "shard_map" and self.axes.isdisjoint(eqn.params["newly_manual_axes"]):
            return None
        tables = (*([guess] if self.guesses else []), mixing, indexing)
        return next((table.RULES[name] for table in tables if name in table.RULES), None)

    def _inside(self, eqn: Any, row_dims: Sequence[RowDims]) -> list[RowDims]:
        if jaxprs.facts(eqn).kind is Kind.CONTROL:
            from zerojax.dims import loops

            return loops.through(self, eqn, row_dims)
        body = compat.evaluated_body(eqn)
        if body is None and self.guesses:
            from zerojax.dims import guess

            body = guess.body_of(eqn)
        return moves.without_rule(eqn, row_dims) if body is None else self.results(body, row_dims)


def _known(variables: Sequence, row_dims: Sequence[RowDims]) -> Mapping[Any, Any]:
    if not any(rows.counting for rows in row_dims if rows is not None):
        return {}
    from zerojax.dims import indexing

    return indexing.known(variables, row_dims)


def _noted(atoms: Sequence, row_dims: Sequence[RowDims], context: Context) -> list[RowDims]:
    """Record in each index array's row dims along which dims its indices are 0, 1, 2, ...; see `indexing.noted`."""
    if not any(is_index(atom) for atom in atoms):
        return list(row_dims)
    from zerojax.dims import indexing

    return indexing.noted(atoms, row_dims, context)


def _drawn(jaxpr: Any, given: Sequence[RowDims], found: Mapping[Any, RowDims]) -> Collection:
    """Return the arrays of random numbers that most likely have one entry per row; see `guess.drawn`."""
    is_bare = lambda var: (rows := found[var]) is not None and not rows.places
    bare = (eqn for eqn in jaxpr.eqns if any(map(is_bare, eqn.outvars)))
    if not any(jaxprs.facts(inner).draws for eqn in bare for inner in jaxprs.with_inner(eqn)):
        return ()
    from zerojax.dims import guess

    return guess.drawn(jaxpr, given, found)


def row_dims_of_params(params: Sequence, experts: Collection[int]) -> list[RowDims]:
    """Return the row dims of each parameter: NOWHERE, or UNKNOWN for an expert, which a data axis divides."""
    return [UNKNOWN if i in experts else NOWHERE for i in range(len(params))]


def row_dims_of_args(args: Sequence, of_rows: Collection[int], follower: Follower | None) -> list[RowDims]:
    """Return the row dims of each array in `args`. In arguments with indices `of_rows`, dim 0 holds the rows."""
    # If the devices do not divide the number of rows, as in some evaluations, every device holds the whole array.
    count = 1 if follower is None else follower.count
    return [
        on_dim(0) if i in of_rows and x.shape and x.shape[0] % count == 0 else NOWHERE
        for i, arg in enumerate(args)
        for x in jax.tree.leaves(arg)
        if isinstance(x, jaxprs.ARRAYS)
    ]
