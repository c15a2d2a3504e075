"""Shard the optax update over the devices, divide it into groups, and run the groups.

Read the files in this order:

1. `transformation` calls the wrapped transformation, and describes it for checkpoints. `master_weights` keeps wide
   copies of narrow parameters.
2. `traced` makes the update a function of lists, and a list of equations.
3. `elementwise` finds the leaves whose update is elementwise. These leaves may be flat, or be updated in chunks.
4. `partition` chooses the state to offload, and divides the update into groups. Offloaded state stays on the host or
   on disk between steps.
5. `cores` and `owned` choose the matrices that owners compute. A core is the part of a leaf's update that needs the
   full leaf. An owner is the device, or the group of devices, that computes a core.
6. `plan` runs these analyses once per plan, and makes the plan.
7. `update` runs the first group in the program of a step. `zerojax.streaming` runs all other groups.

The remaining files check and convert states and parameters: `state_forms` and `logical_state`.
"""
