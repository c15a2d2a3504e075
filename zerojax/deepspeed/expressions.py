"""Python as a syntax tree: printed with `ast.unparse`, and evaluated node by node, without `exec`.

A configuration's values enter a tree as constants only, so that no text of a file can become code.
"""

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


def literal(value: Any) -> ast.expr:
    """Return a tree unchanged, and a number, a string or a tuple as a tree."""
    if isinstance(value, ast.expr):
        return value
    if isinstance(value, tuple):
        return ast.Tuple([literal(one) for one in value], ast.Load())
    assert value is None or type(value) in (bool, int, float, str), type(value)
    return ast.Constant(value)


def name(dotted: str) -> ast.expr:
    """Return the tree of a name such as `"optax.adamw"`."""
    first, *others = dotted.split(".")
    tree: ast.expr = ast.Name(first, ast.Load())
    for attribute in others:
        tree = ast.Attribute(tree, attribute, ast.Load())
    return tree


def call(function: str, *args: Any, **kwargs: Any) -> ast.expr:
    """Return the tree of a call, such as `optax.adamw(0.1, b1=0.9)`."""
    keywords = [ast.keyword(argument, literal(value)) for argument, value in kwargs.items()]
    return ast.Call(name(function), [literal(value) for value in args], keywords)


def binary(left: Any, operation: ast.operator, right: Any) -> ast.expr:
    """Return the tree of an operation on two values."""
    return ast.BinOp(literal(left), operation, literal(right))


def parse(text: str) -> ast.expr:
    """Return the tree of a user's expression.

    Raises:
        TypeError: If it is no text.
        ValueError: If the text is no single Python expression.
    """
    if not isinstance(text, str):
        raise TypeError(
            f'optimizer= is Python as a string, such as "optax.adamw(3e-4)", not a {type(text).__name__}. An optax '
            f"transformation itself goes to zero_shard, in the place of found.optimizer."
        )
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"optimizer={text!r} is no Python expression ({error}). Give a single expression, such as "
            f'"optax.adamw(3e-4)".'
        ) from error


def evaluate(tree: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return the value of a tree of names, calls, literals and arithmetic.

    Args:
        tree: To evaluate.
        variables: Known beside `NAMES`.

    Raises:
        ValueError: If the tree has a name that is not known, or anything else, such as a lambda.
    """
    value = lambda node: evaluate(node, variables)
    match tree:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=known) if known in variables or known in NAMES:
            return variables[known] if known in variables else NAMES[known]
        case ast.Attribute(value=base, attr=attribute) if not attribute.startswith("_"):
            return getattr(value(base), attribute)
        case ast.Call(func=function, args=args, keywords=keywords) if all(one.arg for one in keywords):
            return value(function)(*map(value, args), **{str(one.arg): value(one.value) for one in keywords})
        case ast.Tuple(elts=items):
            return tuple(map(value, items))
        case ast.List(elts=items):
            return list(map(value, items))
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            return {value(key): value(one) for key, one in zip(keys, values, strict=True) if key is not None}
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](value(left), value(right))
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in OPERATORS:
            return OPERATORS[type(operation)](value(operand))
    raise ValueError(
        f"{ast.unparse(tree)!r} in optimizer= is not evaluated: only calls, literals and arithmetic on "
        f"{', '.join(MODULES)} and zerojax are. Build the transformation in Python, and give it to zero_shard in the "
        f"place of found.optimizer."
    )


def imports(trees: list[ast.expr]) -> list[str]:
    """Return the import statements that the trees need, with the empty lines around them."""
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    lines = [*(line for module, line in MODULES.items() if module in used), "", "import zerojax"]
    if ours := [known for known in OURS if known in used]:
        lines.append(f"from zerojax import {', '.join(ours)}")
    return [*lines, ""]
