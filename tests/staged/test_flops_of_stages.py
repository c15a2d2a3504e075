"""The stages of a step compute the products of plain jit: none twice, except inside of the user's `jax.checkpoint`."""

import functools

import jax
import pytest
from disk_models import LOSSES, batch_of, model_params, on_disk

from zerojax.inspect.hlo import read
from zerojax.inspect.roofline import kernels, product_flops
from zerojax.staged.stage import Stage


def flops_of(program, args):
    return sum(product_flops(kernels(read(program.lower(*args).compile()))).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["remat_loop", "remat_one_by_one"])
def test_stages_compute_the_products_of_plain_jit(tmp_path, monkeypatch, optimized, name):
    """On one device. Plain jit runs the loop: XLA:CPU undoes a `jax.checkpoint` of layers that run one by one."""
    counts, made = [], Stage.__init__

    def counting(stage, *args):
        made(stage, *args)

        def wrapped(program):
            @functools.wraps(program)
            def run(*args):
                counts.append(flops_of(program, args))
                return program(*args)

            return run

        stage.forward, stage.backward = wrapped(stage.forward), wrapped(stage.backward)

    monkeypatch.setattr(Stage, "__init__", counting)
    tx = on_disk(tmp_path, devices=1)
    tx.train_step(LOSSES[name])(tx.create(model_params()), batch_of())
    plain = flops_of(jax.jit(jax.value_and_grad(LOSSES["remat_loop"])), (model_params(), batch_of()))
    assert sum(counts) == plain > 0
