"""A training step in stages, driven from Python: parameters, gradients and optimizer state are in files.

model_files    the files of parameters and gradients, and what of them is kept in host memory
sources        from a parameter's chunks on disk to the shard that a segment gathers, and back to its gradient
stage          a segment as a compiled program each way; alike segments share one
loop           a scan over layers, one iteration at a time
program        a loss as stages: the order of reads, and how many gradients each chunk gets
microbatch     runs the stages forward and backward, reads ahead and writes behind
reductions     scalars that the update needs of all gradients (norms), summed chunk by chunk
update         the update, chunk by chunk
"""
