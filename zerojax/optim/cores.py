"""Find the core of each leaf's update, which is the part of its equations that needs the full matrix.

Transformations are not recognised by name. A core contains all equations of the leaf's update that multiply or
decompose matrices, and all equations between them. Elementwise equations before and after the core, such as momentum or
weight decay, stay sharded like the leaf. A core reads only arrays of one leaf, and values that all leaves share (a
count, a schedule, the norm of all gradients). So one device can compute a core.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zerojax import compat, jaxprs
from zerojax.layout.encoding import BY_BLOCK
from zerojax.layout.leaf import Leaf
from zerojax.optim.elementwise import has_products, is_by_element
from zerojax.optim.traced import GRAD, PARAM, STATE, Core, TracedUpdate, equations_behind, union

# A core may read and return values that are not sharded, such as a norm. Each may have at most this many elements,
# because it is sent to all devices.
SMALL = 8192


def equations_after(jaxpr: Any, cores: Sequence[Core]) -> tuple[set[int], set[int]]:
    """Return the indices of the equations of `cores`, and of all other equations that depend on results of `cores`."""
    inside = {e for core in cores for e in core.eqns}
    made = jaxprs.dependent_on([var for e in inside for var in jaxpr.eqns[e].outvars], jaxpr.eqns)
    late = {e for e, eqn in enumerate(jaxpr.eqns) if not made.isdisjoint(jaxprs.variables_in(eqn.invars))}
    return inside, late - inside


class CoreFinder:
    """Find the cores of one traced update."""

    def __init__(self, traced: TracedUpdate, grads: Sequence[Leaf], state: Sequence[Leaf], param_of: Sequence):
        """Find the leaves that each variable depends on. The last three arguments are fields of `UpdatedLeaves`."""
        self.traced, self.grads, self.state, self.param_of = traced, grads, state, list(param_of)
        self._follow()
        for k, (i, var) in enumerate(zip(param_of, traced.state_outs, strict=True)):
            # Without a matching path, a state leaf belongs to the only parameter that it depends on.
            if i is None and state[k].shape and len(found := union(self.depends, [var])) == 1:
                (self.param_of[k],) = found
        self._follow()

    def _follow(self) -> None:
        """Map each variable to the indices of the leaves that it depends on.

        A scalar that is computed from several leaves, such as the norm of all gradients, depends on no leaf here.
        """
        self.depends: dict[Any, frozenset] = {}
        for var, (kind, k) in self.traced.reads.items():
            i = k if kind in (GRAD, PARAM) else self.param_of[k] if kind == STATE else None
            if i is not None:
                self.depends[var] = frozenset((i,))
        self.makers: dict[int, dict[Any, int]] = {}  # for each leaf, the equations of variables that depend on it alone
        of_several: set = set()
        for e, eqn in enumerate(self.traced.jaxpr.eqns):
            found = union(self.depends, eqn.invars)
            is_several = len(found) > 1 or not of_several.isdisjoint(jaxprs.variables_in(eqn.invars))
            for var in eqn.outvars:
                if is_several and var.aval.shape == ():
                    of_several.add(var)
                    continue
                self.depends[var] = found
                if len(found) == 1:
                    self.makers.setdefault(next(iter(found)), {})[var] = e

    def find(self) -> tuple[dict[int, Core], dict[int, str]]:
        """Return each `Core` by parameter. For every other update that multiplies matrices, return why it has none."""
        cores, refused, all_eqns = {}, {}, self.traced.jaxpr.eqns
        for i, leaf in enumerate(self.grads):
            results = [self.traced.jaxpr.outvars[i], *(var for var, _ in self._state_of(i))]
            eqns, _ = equations_behind(self.traced.jaxpr, self.makers.get(i, {}), results)
            if leaf.kind != "sharded" or not any(has_products(all_eqns[e]) for e in eqns):
                continue
            found = "other mesh axes divide it" if any(leaf.others) else self._core(i, leaf, eqns)
            if isinstance(found, str):
                refused[i] = found
            else:
                cores[i] = found
        for eqn in filter(has_products, all_eqns):
            together = union(self.depends, eqn.invars)
            for i in together if len(together) > 1 else ():
                if self.grads[i].kind == "sharded" and len(self.grads[i].shape) > 1:
                    cores.pop(i, None)
                    refused[i] = f"its update is computed together with that of {len(together) - 1} others"
        return cores, refused

    def _state_of(self, i: int) -> list[tuple[Any, Leaf]]:
        """Return the variables of the new state of parameter `i`, with their layouts."""
        found = zip(self.traced.state_outs, self.state, self.param_of, strict=True)
        return [(var, leaf) for var, leaf, param in found if param == i and not compat.is_literal(var)]

    def _is_elementwise(self, eqn: Any, shape: tuple[int, ...]) -> bool:
        if eqn.primitive.name in BY_BLOCK:
            return True
        atoms = (*eqn.invars, *eqn.outvars)
        if any(atom.aval.shape not in ((), shape) for atom in atoms):
            return False
        if eqn.primitive.name == "broadcast_in_dim":
            return eqn.invars[0].aval.shape == ()
        return is_by_element(eqn) or all(atom.aval.shape == () for atom in atoms)

    def _core(self, i: int, leaf: Leaf, eqns: list[int]) -> Core | str:
        """Return the core of parameter `i`, or the reason why the parameter has no core.

        The core must contain all products, and all non-elementwise equations before or after a product. It also
        contains every equation between two of these. Only arrays with a known layout can be sent to owners.
        So if the core reads an array of unknown layout, the equation that computes this array joins the core.
        """
        all_eqns, makers, inside = self.traced.jaxpr.eqns, self.makers[i], set(eqns)
        made = lambda e: {makers[v] for v in jaxprs.variables_in(all_eqns[e].invars) if makers.get(v) in inside}
        needs = {e: made(e) for e in eqns}
        users: dict[int, set[int]] = {e: set() for e in eqns}
        for e, needed in needs.items():
            for other in needed:
                users[other].add(e)
        behind = lambda marked: set(jaxprs.reached(marked, needs.__getitem__))
        ahead = lambda marked: set(jaxprs.reached(marked, users.__getitem__))
        heavy = {e for e in eqns if has_products(all_eqns[e])}
        mixed = {e for e in eqns if e in heavy or not self._is_elementwise(all_eqns[e], leaf.shape)}
        core, more, read = set(), mixed & (behind(heavy) | ahead(heavy)), []
        while more:
            core = behind(core | more) & ahead(core | more)
            produced = {v for e in core for v in all_eqns[e].outvars}
            of_core = (v for e in sorted(core) for v in jaxprs.variables_in(all_eqns[e].invars))
            read = list(dict.fromkeys(v for v in of_core if v not in produced))
            more = {makers[v] for v in read if v in makers and v.aval.size > 1 and self._layout_of(v, leaf) is None}
        return self._described(i, leaf, sorted(core), read)

    def _described(self, i: int, leaf: Leaf, core: list[int], read: list) -> Core | str:
        """Make a `Core` of the equations `core`, which read the variables `read`, or say why owners cannot run it."""
        position, this, all_eqns = self.traced.positions, frozenset((i,)), self.traced.jaxpr.eqns
        arrays, small, shared, outs, small_outs, taken = [], [], [], [], [], set(core)
        for v in read:
            found = self.depends.get(v, frozenset())
            where = self._layout_of(v, leaf) if found == this else None
            if found - this:
                return "its update reads arrays of other parameters"
            if where is not None and where.kind == "sharded":
                arrays.append((position[v], where))
            elif v.aval.size > SMALL:
                return "its update reads a large array that is not sharded"
            else:
                (small if found == this else shared).append(position[v])
        if any(any(where.others) or where.axes != leaf.axes for _, where in arrays):
            return "other mesh axes divide a part of its state"
        used = {v for e, eqn in enumerate(all_eqns) if e not in taken for v in jaxprs.variables_in(eqn.invars)}
        used.update(jaxprs.variables_in(self.traced.jaxpr.outvars))
        of_state = dict(self._state_of(i)[::-1])
        for v in (v for e in core for v in all_eqns[e].outvars if not compat.is_dropped(v) and v in used):
            where = of_state[v] if v in of_state else self._layout_of(v, leaf)
            if where is not None and where.kind == "sharded":
                outs.append((position[v], where))
            elif v.aval.size > SMALL:
                return "its update has a large intermediate of another shape"
            else:
                small_outs.append(position[v])
        return Core(i, tuple(core), tuple(arrays), tuple(small), tuple(shared), tuple(outs), tuple(small_outs))

    def _layout_of(self, var: Any, leaf: Leaf) -> Leaf | None:
        """Return the layout of `var` if `var` is a state leaf or has the shape of `leaf`, and otherwise None."""
        kind, k = self.traced.reads.get(var, ("", 0))
        if kind == STATE:
            return self.state[k]
        return dataclasses.replace(leaf, dtype=var.aval.dtype) if var.aval.shape == leaf.shape else None
