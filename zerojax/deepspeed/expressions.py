"""Build Python text from names and literals, and evaluate it node by node, without `exec`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import zerojax
from zerojax.config import DynamicScale, Offload, Precision, Wire

MODULES = {"jax": "import jax", "jnp": "import jax.numpy as jnp", "optax": "import optax"}
OURS = {"DynamicScale": DynamicScale, "Offload": Offload, "Precision": Precision, "Wire": Wire}
NAMES: Mapping[str, Any] = {"jax": jax, "jnp": jnp, "optax": optax, "zerojax": zerojax, "dict": dict} | OURS
OPERATORS: Mapping[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Code(str):
    """Python text that `call` inserts unchanged. `call` inserts every other value as a literal, never as code."""

    __repr__ = str.__str__


def call(function: str, *args: Any, **kwargs: Any) -> Code:
    """Return the text of a call, such as `optax.adamw(0.1, b1=0.9)`."""
    arguments = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return Code(f"{function}({', '.join(arguments)})")


def user_expression(text: str) -> Code:
    """Check that the user's text is one Python expression, and return it as `ast` prints it."""
    if not isinstance(text, str):
        raise TypeError(
            f'optimizer= is Python as a string, such as "optax.adamw(3e-4)", not a {type(text).__name__}. Give '
            f"an optax transformation to zero_shard, instead of found.optimizer."
        )
    try:
        return Code(ast.unparse(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"optimizer={text!r} is no Python expression ({error}). Give a single expression, such as "
            f'"optax.adamw(3e-4)".'
        ) from error


def defined(source: str) -> dict[str, Any]:
    """Return the values of the variables that `source` assigns, each evaluated from its syntax tree."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = _evaluate(node.value, {**NAMES, **found})
    return found


def _evaluate(tree: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a tree of names, calls, literals and arithmetic. Refuse other nodes, such as a lambda."""
    value = lambda node: _evaluate(node, names)
    match tree:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=known) if known in names:
            return names[known]
        case ast.Attribute(value=base, attr=attribute) if not attribute.startswith("_"):
            return getattr(value(base), attribute)
        case ast.Call(func=function, args=args, keywords=keywords) if all(keyword.arg for keyword in keywords):
            return value(function)(*map(value, args), **{str(word.arg): value(word.value) for word in keywords})
        case ast.Tuple(elts=items):
            return tuple(map(value, items))
        case ast.List(elts=items):
            return list(map(value, items))
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            return dict(zip(map(value, keys), map(value, values), strict=True))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](value(left), value(right))
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](value(operand))
    raise ValueError(
        f"{ast.unparse(tree)!r} in optimizer= is not evaluated: only calls, literals and arithmetic on "
        f"{', '.join(MODULES)} and zerojax are. Build the transformation in Python, and give it to zero_shard instead "
        f"of found.optimizer."
    )


def imports(text: str) -> list[str]:
    """Return the import statements that the Python `text` needs, as lines, with empty lines around them."""
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    lines = [*(line for module, line in MODULES.items() if module in used), "", "import zerojax"]
    if ours := [known for known in OURS if known in used]:
        lines.append(f"from zerojax import {', '.join(ours)}")
    return [*lines, ""]
