"""Shard the optax update over the devices.

The core is four files:

1. `transformation` calls the wrapped transformation.
2. `elementwise` finds the leaves whose update is elementwise. These leaves may be flat, or be updated in chunks.
3. `sharding_plan` plans from shapes how parameters, gradients and state are sharded.
4. `update` makes the first state, and runs the update in the program of a step.

The other files are loaded when an option or an update needs them:

- `traced`, `planned_update`: the update as equations, and what a plan says of it.
- `cores`, `owned`, `equations`: owners compute matrix updates. A core is the part of a leaf's update that needs the
  full leaf. An owner is the device, or the group of devices, that computes a core.
- `partition`, `offloaded`: offloaded state, and the groups of the update, which `zerojax.streaming` runs.
- `master_weights`: wide copies of narrow parameters.
- `returned_state`, `logical_state`: the state outside of a step. `description`: the transformation in a checkpoint.
- `mismatch`: why a state does not fit a step.
"""
