"""Write and read, as JSON, the data that is saved with a state, such as the position of a data iterator.

Plain values, lists, tuples, dicts, bytes, arrays and PRNG keys are restored as they were. For an object with
`get_state` and `set_state`, such as a grain iterator, its state is written. Any other pytree node is written as the
list of its children, and restoring the node needs a template.
"""

import base64
from typing import Any

import jax
import numpy as np

from zerojax.checkpoint.arrays import is_key

PLAIN = (str, int, float, bool, type(None))


def encode(data: Any) -> Any:
    """Encode data as JSON values. Tuples, dicts, bytes and arrays become dicts whose keys name the type.

    Raise a `TypeError` for a value of an unknown type that is not a pytree node.
    """
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
    """Undo `encode` for one dict that names a type. `json.loads` calls this for inner dicts first, as `object_hook`."""
    if "tuple" in tagged:
        return tuple(tagged["tuple"])
    if "dict" in tagged:
        return dict(tagged["dict"])
    if "bytes" in tagged:
        return base64.b64decode(tagged["bytes"])
    if "key" in tagged:
        return jax.random.wrap_key_data(tagged["of"], impl=tagged["key"])
    array = np.frombuffer(base64.b64decode(tagged["array"]), jax.numpy.dtype(tagged["dtype"])).reshape(tagged["shape"])
    return jax.numpy.array(array) if tagged["as"] == "jax" else array.copy()


def fill(template: Any, saved: Any) -> Any:
    """Return `saved` in the pytree nodes of `template`, whose objects with `set_state` are set to their saved states.

    Raise a `ValueError` if structures differ, except in a list's length. Without a template, return plain containers.
    """
    if template is None:
        return saved
    if has_state(template):
        template.set_state(saved)
        return template
    if type(template) in (list, tuple) and type(template) is type(saved) and len(template) != len(saved):
        return saved  # such as a list of losses, which grows during the run
    if isinstance(template, dict) and isinstance(saved, dict) and template.keys() == saved.keys():
        return {key: fill(x, saved[key]) for key, x in template.items()}
    children, node = jax.tree.flatten(template, is_leaf=lambda x: x is not template)
    if len(children) == 1 and children[0] is template:
        return saved
    values = list(saved.values()) if isinstance(saved, dict) else saved
    if not isinstance(values, list | tuple) or len(values) != len(children):
        raise ValueError(
            f"The data that was saved is no {type(template).__name__} of {len(children)}, as data= is: "
            f"{str(saved)[:200]}. Give data= the structure that was saved, or leave it out to get plain containers."
        )
    return jax.tree.unflatten(node, [fill(a, b) for a, b in zip(children, values, strict=True)])


def has_state(x: Any) -> bool:
    return callable(getattr(x, "get_state", None)) and callable(getattr(x, "set_state", None))
