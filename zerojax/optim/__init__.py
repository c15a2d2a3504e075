"""Shard the optax update: decide where its gradients and state live, divide it into groups, and run it.

Read the files in this order:

1. `transformation`, `master_weights`: how the wrapped transformation is called, and the wide copies of narrow
parameters. 2. `flat_update`, `traced`: the update as a function of lists, and as equations.
3. `elementwise`: which leaves may be flat or updated in chunks, because their update is elementwise.
4. `offloaded`, `partition`: which state is offloaded, and the groups of the update. Each group has a place, where its
state
   waits between steps.
5. `owned_group`, `cores`, `dims`, `owned`: which matrices are computed by owners. A core is the part of a leaf's update
   that needs the leaf whole, and an owner is the device, or the devices, that compute it.
6. `summary`, `planned_update`, `plan`: all of these analyses, once, for a plan; and the plan itself.
7. `evaluate`, `update`: run the first group in the program of a step. `zerojax.streaming` runs all other groups.

The remaining files convert and check what users hold: `checks`, `state_forms`, `logical_state`, `outer_chain`,
`description`, `weight_ema`.
"""
