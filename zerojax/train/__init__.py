"""Training: the state of a run, the training step, and gradients and updates of trees.

Read these files in this order. A step of stage 0 to 3 without options needs no other file here.

    step            `Step` checks the state, places the batch, and calls an executor, usually a `JittedStep`
    step_program    has the functions that a step traces: gradients, update and metrics. `JittedStep` compiles them
    loss            describes a loss function (`Loss`), and how a step calls it in global or device view (`View`)
    gradients       differentiates the loss, and combines the results of devices and microbatches
    state           defines `ZeroState`, and creates it; `params` initialises, shards and reads parameters
    arguments       finds the batch among the arguments of a call, and places it; `checked` explains errors

The table in `attachments` lists the files for offloading, memory and several processes. `several_losses` calls a loss
per device or microbatch. `tree_api` and `eval_step` are for hand-written loops and evaluation.
"""
