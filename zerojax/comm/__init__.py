"""The mesh, every collective that zerojax writes, and messages between processes.

Loaded by every step, in reading order:
    mesh                 chooses the mesh, moves arrays between Explicit and Auto axes, and has zerojax's `shard_map`
    manual               gathers and reduces leaves in buckets, inside a `shard_map`, and orders operations
    collectives          does the same outside of a `shard_map` (global view): the methods that the engine calls
    partial_sums         keeps gradients as partial sums until they are reduced (global view)

Loaded when a loss or an option needs it:
    device_collectives   has the same methods as `collectives`, for device view
    quantised            encodes leaves that are sent in few bits (`Wire`)
    typed                evaluates functions that are written for Explicit axes
    own_rows             runs Pallas kernels on each device's rows
    other_sums           finds sums over rows that are not matrix products, also in a user's `shard_map`
    owners               sends matrices to the devices that update them (`Owners`)
    processes            publishes the calls of each process, and exchanges messages between processes
"""
