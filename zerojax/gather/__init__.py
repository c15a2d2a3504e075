"""The engine of stage 3 gathers each parameter where the loss uses it, and reduce-scatters its gradient.

`engine.trace_loss` traces a loss to a `Program`, and `train.gradients` runs the program forward and backward. A program
is a list of segments. A segment has equations of the loss that run together on the same gathered parameters. The loss

    jnp.mean((jnp.tanh(x @ w1) @ w2 - y) ** 2)

has four segments: `x @ w1`, `tanh`, the product with `w2`, and the mean. The two segments that gather are blocks. The
gather of `w2` starts when the first block starts, so that `x @ w1` hides the gather. After a block, its parameters are
dropped. The backward pass runs the segments in reverse, and once more gathers each parameter before its use.

The engine runs in two views. In device view, a value is one device's part of an array. In global view, the default, a
value is a global array, which the compiler divides over the devices. The engine calls the same methods of `Collectives`
in both views.

In global view, a gradient that is not reduced yet may have one more dim in front than its parameter. Its shape is then
`(workers, *shape)`, with one partial sum per worker. With hybrid sharding, the shape of a reduce-scattered gradient may
be `(groups, *shape)`, with one partial sum per group of devices. So code here compares a gradient's `ndim` with its
parameter's, and counts dims from the end. In device view, no gradient has the additional dim.

First read docs/engine.md, or "A reading path" in docs/design.md, and then these files, in this order. A loss like the
one above needs no other file.

    planner         turns the jaxpr of the loss into a `Program`, and lists the optional passes
    rules           has a table of rules; the first rule that matches an equation decides what happens to the equation
    engine          `trace_loss` makes a program, and `run_forward` and `run_backward` run it
    vjp             makes the forward and backward pass of one segment, and chooses the residuals to store
    segments        defines `Program` and the kinds of segments
    sharded_param   describes what one use of a parameter gathers
    schedule        decides when each gather starts, and when each gradient is reduced
    evaluate        evaluates equations on parameters that were gathered in a narrower type

The other files are imported when a loss needs them. Read each group in its order.

Loops over layers:
    loop            sorts the operands of a scan over layers, and gathers for one iteration
    scan            makes a scan over layers a segment, and runs its forward pass
    scan_backward   runs its backward pass, a pipeline of four stages
    paired          computes both cotangents of a product of activations next to each other
    unrolled        unrolls loops over parameters on disk

Values that are computed on a shard, or on one layer of a stack:
    sliced          slices the shard of a parameter, or changes its layout, before the gather
    parts           finds values that can be computed on one device's part of an array, or on one layer
    on_parts        computes them
    reduced         computes reductions of parameters, such as penalties and norms, on shards
    shardwise       computes quantised weights on shards, and differentiates them
    narrow          finds quantised weights, and moves their computation to the start of the loss
    unread          lets functions with a custom derivative take a quantised value instead of the whole parameter
    per_layer       moves an operation on a whole stack of layers into the loop, which gathers one layer at a time

Work that is shared. `engine.gather_groups` decides which blocks share a gather. `clusters` moves uses of one parameter
next to each other, so that these uses can share a gather. `schedule._gather` gathers parameters with equal keys once. A
weight that two blocks of different groups use is gathered for each of the groups. The files:
    clusters        finds equations that share a gather with another use of their parameter
    merged          merges equations that compute the same value
    equal           lets equal segments share their passes, and keeps the names of each

Around these:
    known_parts     divides a `shard_map` into what it computes from parameters alone, and the rest
    on_use          turns a program into a function that JAX differentiates, for evaluation
    working_set     counts how much is gathered at a time, for `check` and `estimate`
    tiled           `block` marks a layer; `tiled` runs a loop over tiles of a sequence as one block
"""
