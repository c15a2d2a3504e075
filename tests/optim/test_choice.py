"""Where offloaded state is updated: as the option says, or the faster way for the bytes of a parameter."""

from types import SimpleNamespace

import optax
import pytest
from conftest import mesh_of

from zerojax import Offload, zero_shard
from zerojax.offload.measure import Speed
from zerojax.optim import plan


def choice(update, sizes, param_of, offloaded=(0, 1)):
    config = zero_shard(
        optax.adam(1.0), stage=1, mesh=mesh_of(8), offload=Offload(optimizer="host", update=update)
    ).config
    leaves = [SimpleNamespace(size=size, bytes=4 * size) for size in sizes]
    planned = SimpleNamespace(
        offloaded=offloaded, state=[leaves[i or 0] for i in param_of], grads=leaves, param_of=param_of
    )
    return plan.choose_update(config, planned)


@pytest.mark.parametrize("update", ["device", "host"])
def test_a_given_way_is_taken_without_measuring(update):
    found = choice(update, [64], (0, 0))
    assert (found.update, found.why) == (update, f"as Offload(update={update!r}) says")
    assert choice(update, [64], (0, 0), offloaded=()) is None


@pytest.mark.parametrize(
    ("sizes", "param_of", "per_parameter"),
    [
        ([64], (0, 0), 8),  # two moments
        ([1], (0, 0), 8),
        ([64, 16], (0, 1), 4),
        ([64], (None, None), 512),  # of no parameter: as if of one
    ],
)
def test_the_bytes_of_a_parameter_decide(sizes, param_of, per_parameter, monkeypatch):
    monkeypatch.setattr(plan, "on_auto_mesh", lambda *args: Speed(link=1e9, host=30e9))
    found = choice("auto", sizes, param_of)
    assert f"({per_parameter:.1f} bytes of state each way" in found.why
    assert found.update == ("host" if per_parameter > 4 else "device")
