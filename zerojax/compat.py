"""The parts of JAX that are spelled differently from version to version."""


def opened(jaxpr):
    """`(jaxpr, consts)` of a closed jaxpr: two classes before jax 0.12, one since."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "jaxpr") else (jaxpr, getattr(jaxpr, "consts", ()))
