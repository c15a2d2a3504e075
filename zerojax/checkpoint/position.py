"""The position in the data, and whatever else goes with a state, as JSON.

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

PLAIN = (str, int, float, bool, type(None))


def dumps(data: Any) -> str:
    """`data` as text.

    Raises:
        TypeError: If there is something in it that can be neither kept nor taken apart.
    """
    return json.dumps(encode(data))


def loads(text: str, template: Any = None) -> Any:
    """What was written.

    Args:
        text: From `dumps`.
        template: None, or something like what was written: objects in it that have
            `set_state` are set to what was saved of them, and its nodes are used.

    Raises:
        ValueError: If the template is of another structure than what was written.
    """
    return filled(template, decode(json.loads(text)))


def encode(data: Any) -> Any:
    """As nested lists and dicts of JSON; what is no plain list or string is a dict with a tag."""
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
            f"data= holds a {type(data).__name__}, which cannot be written. Give plain values, arrays, containers or "
            f"objects with get_state() and set_state()."
        )
    return [encode(x) for x in children]


def encode_array(x: Any) -> dict:
    """An array with its type, or a PRNG key with its implementation."""
    if is_key(x):
        return {"key": str(jax.random.key_impl(x)), "of": encode_array(jax.random.key_data(x))}
    host = np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) and x.is_fully_replicated else x)
    where = "jax" if isinstance(x, jax.Array) else "numpy"
    return {
        "array": base64.b64encode(host.tobytes()).decode(),
        "dtype": host.dtype.name,
        "shape": host.shape,
        "as": where,
    }


def decode(found: Any) -> Any:
    """The inverse of `encode`, without a template."""
    if isinstance(found, list):
        return [decode(x) for x in found]
    if not isinstance(found, dict):
        return found
    if "tuple" in found:
        return tuple(decode(x) for x in found["tuple"])
    if "dict" in found:
        return {decode(k): decode(v) for k, v in found["dict"]}
    if "bytes" in found:
        return base64.b64decode(found["bytes"])
    if "key" in found:
        return jax.random.wrap_key_data(decode(found["of"]), impl=found["key"])
    host = np.frombuffer(base64.b64decode(found["array"]), jax.numpy.dtype(found["dtype"])).reshape(found["shape"])
    return jax.numpy.array(host) if found["as"] == "jax" else host.copy()


def filled(template: Any, found: Any) -> Any:
    """`found` in the nodes of a template, whose objects with a state are set to it."""
    if template is None:
        return found
    if has_state(template):
        template.set_state(found)
        return template
    if type(template) in (list, tuple) and type(template) is type(found) and len(template) != len(found):
        return found  # something that grows, as a list of losses does
    if isinstance(template, dict) and isinstance(found, dict) and template.keys() == found.keys():
        return {key: filled(x, found[key]) for key, x in template.items()}
    children, node = jax.tree.flatten(template, is_leaf=lambda x: x is not template)
    if len(children) == 1 and children[0] is template:
        return found
    parts = list(found.values()) if isinstance(found, dict) else found
    if not isinstance(parts, list | tuple) or len(parts) != len(children):
        raise ValueError(
            f"The data that was saved is no {type(template).__name__} of {len(children)}, as the one given is: "
            f"{str(found)[:200]}. Give data= of the structure that was saved, or none to have it as it is."
        )
    return jax.tree.unflatten(node, [filled(a, b) for a, b in zip(children, parts, strict=True)])


def has_state(x: Any) -> bool:
    """Whether an object gives and takes its state, as grain's iterators do."""
    return callable(getattr(x, "get_state", None)) and callable(getattr(x, "set_state", None))
