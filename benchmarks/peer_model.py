"""Make the inputs of every framework in `peers.py`: tokens, the optimizer's numbers, and the weights by their names.

It needs only NumPy. The reference weights are those of the yardstick's unrolled Flax model, by path:
`block_3/q/kernel`. `stacked` converts them for the scanned model, and `to_torch` for `peer_torch.GPT`.
"""

import numpy as np

# Of optax's and torch's defaults for AdamW those that differ (weight decay) are said, and so are the others.
ADAMW = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}
EPSILON = 1e-6  # of LayerNorm: Flax's default; torch's is 1e-5


def tokens_of(step, *, rows, length, vocabulary):
    """Token ids (rows, length) of a step, int32: few are frequent, so that there is something to learn at once."""
    chances = 1 / np.arange(1, vocabulary + 1)
    drawn = np.random.default_rng([7, step]).choice(vocabulary, (rows, length), p=chances / chances.sum())
    return drawn.astype(np.int32)


def stacked(weights):
    """Weights of the scanned model: leaves of all blocks, (layers, ...), as one."""
    layers = 1 + max(int(path.split("/")[0].removeprefix("block_")) for path in weights if path.startswith("block_"))
    named = {path: leaf for path, leaf in weights.items() if not path.startswith("block_")}
    for path in (path.split("/", 1)[1] for path in weights if path.startswith("block_0/")):
        named[f"blocks/{path}"] = np.stack([weights[f"block_{i}/{path}"] for i in range(layers)])
    return named


def torch_name(path):
    """`blocks.3.q.weight` of `block_3/q/kernel`."""
    *modules, leaf = path.replace("block_", "blocks/").split("/")
    return ".".join([*modules, "bias" if leaf == "bias" else "weight"])


def to_torch(weights):
    """Weights by torch's names, in its layout: of a matrix the rows are what comes out, heads are not a dim."""

    def laid_out(path, leaf):
        module, name = path.split("/")[-2:]
        if name == "kernel":
            contracted = 2 if module == "o" else 1  # (heads, head, width) or (width, heads, head)
            return leaf.reshape(np.prod(leaf.shape[:contracted]), -1).T
        return leaf.reshape(-1) if name == "bias" else leaf

    return {torch_name(path): np.ascontiguousarray(laid_out(path, leaf)) for path, leaf in weights.items()}


def from_torch(named, like):
    """The inverse of `to_torch`, with the paths and shapes of `like`."""
    kernel = lambda path: path.endswith("/kernel")
    turned = {path: named[torch_name(path)].T if kernel(path) else named[torch_name(path)] for path in like}
    return {path: np.ascontiguousarray(leaf).reshape(like[path].shape) for path, leaf in turned.items()}
