"""The mesh, every collective that zerojax writes, and messages between processes.

In reading order:

1. Which devices: `mesh` chooses the mesh. `explicit` moves arrays between Explicit and Auto axes, and `typed` evaluates
   functions that are written for Explicit axes.
2. What is sent: `buckets` packs leaves that share a collective, and `quantised` has formats of few bits.
3. How it is sent: `collectives` has the interface, and its implementation inside a `shard_map` (device view).
   `global_collectives` has the implementation outside (global view), which needs `partial_sums`. `owners` sends
   matrices to the devices that update them.
4. Helpers: `mapped` is the `shard_map` that these modules use, and `barriers` fixes the order of operations.
5. Without devices: `events` publishes the calls of each process, and `processes` exchanges messages.
"""
