"""The engine of stage 3 gathers each parameter where it is used, and reduce-scatters its gradient.

The engine traces the loss, divides its equations into segments, and runs the segments forward and backward. Around each
segment it gathers the segment's parameters.

The engine runs in two views. In device view, a value is one device's part of an array. In global view, the default, a
value is a global array, which the compiler divides over the devices. The engine calls the same methods of `Collectives`
in both views.

Code here compares a gradient's `ndim` with that of its parameter, and counts dims from the end. The reason is global
view, where a gradient that is not reduced yet may have one more dim in front: `(workers, *shape)`, with one partial sum
per worker. With hybrid sharding, a reduce-scattered gradient may have `(groups, *shape)` in the same way. In device
view, no gradient has this dim.

Read docs/engine.md first. Then read the files in this order.

A loss becomes a program:
    engine          `trace_loss` makes the program, which `run_forward` and `run_backward` run
    planner         turns the jaxpr of the loss into a `Program`, and lists the optional passes
    sharded_param   describes a parameter's shard, and what is applied to it before the gather
    rules           has the table of rules that decides about each equation
    segments        defines `Program` and the kinds of segments (read only the classes' docstrings now)

A program runs:
    schedule        decides when each gather starts, and when each gradient is reduced
    vjp             makes the two passes of a segment, and chooses the residuals to store
    segments        (the methods)
    evaluate        runs equations on parameters that were gathered in a narrower type

The remaining modules are imported when a loss needs them.

Loops:
    loop            sorts the operands of a scan over layers, and gathers for one iteration
    scan            makes a scan over layers a segment, and runs its forward pass
    scan_backward   runs its backward pass, a pipeline of four stages
    paired          computes both cotangents of a product of activations next to each other
    per_layer       moves a change of a whole stack of layers into the loop that gathers them one by one
    unrolled        unrolls loops over parameters on disk

Values that are computed on shards:
    narrow          finds quantised weights, and moves their computation to the start of the loss
    unread          opens functions with a custom derivative that read a parameter only to quantise it
    shardwise       computes quantised weights on shards, and differentiates them
    parts           finds values that can be computed on one device's part of an array, or on a layer
    on_parts        computes them
    reduced         finds reductions of parameters, such as penalties and norms, and computes them on shards

Equations that share something:
    clusters        finds the equations that share a gather with an earlier use of their parameter
    merged          merges equations that compute the same value
    equal           lets equal segments share their passes, and keeps the names of each
    known_parts     divides each `shard_map` into what it computes from parameters alone, and the rest

Around the engine:
    on_use          `gather_on_use` returns the program as a function that JAX differentiates
    sliced          slices a parameter's shard, or changes its layout, before the gather
    working_set     counts how much is gathered at a time, for `check` and `estimate`
    tiled           `block` marks a layer; `tiled` runs a loop over tiles of a sequence as one block
"""
