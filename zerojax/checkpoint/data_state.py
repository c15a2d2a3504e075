"""The data that goes with a state, such as the iterator's position, as JSON.

Plain values, lists, tuples, dicts, bytes, arrays and PRNG keys are kept as they are. What has
`get_state` and `set_state`, as grain's iterators have, is asked for its state. Other pytree
nodes come back through a template.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint.arrays import is_key
from zerojax.checkpoint.errors import in_one_line

# JAX on the CPU writes past the end of arrays of these types.
CORRUPTING = ("int2", "uint2")
PLAIN = (str, int, float, bool, type(None))


class UnreadableError(ValueError):
    """Text that does not say what was saved."""


def dumps(data: Any) -> str:
    """Return `data` as text.

    Raises:
        TypeError: If a part of it is neither of a known type nor a pytree node.
    """
    return json.dumps(encode(data))


def loads(text: str | bytes, template: Any = None) -> Any:
    """Return what was written.

    Args:
        text: From `dumps`.
        template: None, or something like what was written: objects in it that have
            `set_state` are set to what was saved of them, and its nodes are used.

    Raises:
        ValueError: If the template is of another structure than what was written.
        UnreadableError: If the text is none that `dumps` wrote.
    """
    try:
        saved = json.loads(text, object_hook=decode)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UnreadableError(in_one_line(error)) from error
    return fill(template, saved)


def encode(data: Any) -> Any:
    """Encode as nested lists and dicts of JSON. A value that is neither plain nor a list becomes a dict with a tag."""
    if isinstance(data, PLAIN):
        return data
    if has_state(data):
        return encode(data.get_state())
    if isinstance(data, list):
        return [encode(x) for x in data]
    if type(data) is tuple:
        return {"tuple": [encode(x) for x in data]}
    if isinstance(data, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in data.items()]}
    if isinstance(data, bytes):
        return {"bytes": base64.b64encode(data).decode()}
    if isinstance(data, jax.Array | np.ndarray | np.generic):
        return encode_array(data)
    children = jax.tree.leaves(data, is_leaf=lambda x: x is not data)
    if len(children) == 1 and children[0] is data:
        raise TypeError(
            f"data= has a {type(data).__name__} in it, which cannot be written. Give plain values, arrays, containers "
            f"or objects with get_state() and set_state()."
        )
    return [encode(x) for x in children]


def encode_array(x: Any) -> dict:
    """Encode an array with its type, or a PRNG key with its implementation."""
    if is_key(x):
        return {"key": str(jax.random.key_impl(x)), "of": encode_array(jax.random.key_data(x))}
    host = np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) and x.is_fully_replicated else x)
    return {
        "array": base64.b64encode(host.tobytes()).decode(),
        "dtype": host.dtype.name,
        "shape": host.shape,
        "as": "jax" if isinstance(x, jax.Array) else "numpy",
    }


def decode(tagged: dict) -> Any:
    """Undo `encode` for one dict of JSON whose values are decoded already."""
    if "tuple" in tagged:
        return tuple(tagged["tuple"])
    if "dict" in tagged:
        return dict(tagged["dict"])
    if "bytes" in tagged:
        return base64.b64decode(tagged["bytes"])
    if "key" in tagged:
        return jax.random.wrap_key_data(tagged["of"], impl=tagged["key"])
    dtype = jax.numpy.dtype(tagged["dtype"])
    if dtype.name in CORRUPTING:
        raise ValueError(f"an array of {dtype.name}, of which no save writes one")
    array = np.frombuffer(base64.b64decode(tagged["array"]), dtype).reshape(tagged["shape"])
    return jax.numpy.array(array) if tagged["as"] == "jax" else array.copy()


def fill(template: Any, saved: Any) -> Any:
    """Put `saved` into the nodes of a template. Objects with a state are set to it."""
    if template is None:
        return saved
    if has_state(template):
        template.set_state(saved)
        return template
    if type(template) in (list, tuple) and type(template) is type(saved) and len(template) != len(saved):
        return saved  # something that grows, as a list of losses does
    if isinstance(template, dict) and isinstance(saved, dict) and template.keys() == saved.keys():
        return {key: fill(x, saved[key]) for key, x in template.items()}
    children, node = jax.tree.flatten(template, is_leaf=lambda x: x is not template)
    if len(children) == 1 and children[0] is template:
        return saved
    values = list(saved.values()) if isinstance(saved, dict) else saved
    if not isinstance(values, list | tuple) or len(values) != len(children):
        raise ValueError(
            f"The data that was saved is no {type(template).__name__} of {len(children)}, as the one given is: "
            f"{str(saved)[:200]}. Give data= of the structure that was saved, or none to have it as it is."
        )
    return jax.tree.unflatten(node, [fill(a, b) for a, b in zip(children, values, strict=True)])


def has_state(x: Any) -> bool:
    """Return whether an object gives and takes its state, as grain's iterators do."""
    return callable(getattr(x, "get_state", None)) and callable(getattr(x, "set_state", None))
