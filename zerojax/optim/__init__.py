"""Shard the optax update over the devices, divide it into groups, and run the groups.

Read the files in this order:

1. `transformation` calls the wrapped transformation. `master_weights` keeps wide copies of narrow parameters.
2. `flat_update` makes the update a function of lists, and `traced` makes it a list of equations.
3. `elementwise` finds the leaves whose update is elementwise. These leaves may be flat, or be updated in chunks.
4. `offloaded` chooses the state to offload. `partition` divides the update into groups. Each group has a place, where
   its state waits between steps.
5. `owned_group`, `cores`, `dims` and `owned` choose the matrices that owners compute. A core is the part of a leaf's
   update that needs the full leaf. An owner is the device, or the group of devices, that computes a core.
6. `planned_update` runs these analyses once per plan, `summary` describes their results, and `plan` makes the plan.
7. `evaluate` and `update` run the first group in the program of a step. `zerojax.streaming` runs all other groups.

The remaining files check, convert or describe states and parameters: `checks`, `state_forms`, `logical_state`
and `description`.
"""
