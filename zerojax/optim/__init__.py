"""Shard the optax update over the devices.

Every update uses four files:

1. `wrapped` calls the wrapped transformation.
2. `elementwise` finds the leaves whose update is elementwise. These leaves may be flat, or be updated in chunks.
3. `sharding_plan` plans from shapes how parameters, gradients and state are sharded.
4. `update` makes the first state, and runs the update in the program of a step.

The other files are loaded when an option or an update needs them:

- `traced`: the update as equations.
- `cores` finds the core of each leaf's update, which is the part that needs the full leaf. `owned` decides which cores
  owners compute: an owner is a device, or a few neighbouring devices. `equations` stacks equal cores, and
  `zerojax.comm.owners` sends them to their owners and back.
- `partition` chooses the state to offload, and divides the update into groups, which `zerojax.streaming` runs.
- `master_weights`: wide copies of narrow parameters.
- `returned_state`, `logical_state`: the state outside of a step. `description`: the transformation in a checkpoint.
- `mismatch`: why a state does not fit a step.

A group is always a part of an update: parameters and state leaves that are computed together.
"""
