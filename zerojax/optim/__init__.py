"""Shard the optax update over the devices.

Every update uses four files:

1. `wrapped` calls the wrapped transformation.
2. `elementwise` finds the leaves whose update is elementwise, so that they may be stored flat or updated in chunks.
3. `sharding_plan` plans from shapes how parameters, gradients and state are sharded.
4. `update` makes the first state, and runs the update in the program of a step.

The other files are loaded when an option or an update needs them:

- `traced` traces the update into equations.
- `cores` finds the core of each leaf's update, which is the part that needs the full leaf. An owner is a device, or a
  few neighbouring devices, that computes a core. `owned` decides which cores have owners. `equations` stacks equal
  cores, and `zerojax.comm.owners` sends them to their owners and back.
- `partition` chooses the state to offload, and divides the update into groups, which `zerojax.streaming` runs.
- `master_weights` keeps wide copies of narrow parameters in the state.
- `returned_state` and `logical_state` convert the state for use outside of a step.
- `in_trees` finds parameters and their state in the tree of a hand-written loop, for reports and checkpoints.
- `description` describes the transformation in a checkpoint. `mismatch` explains why a state does not fit a step.

A group is always a part of an update: parameters and state leaves that are computed together.
"""
