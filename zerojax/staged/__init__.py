"""Run a training step as many programs. Parameters, gradients and optimizer state are in files.

model_files   read and write the files of parameters and gradients, and represent parameters in a tree by nodes
program       divide a loss into stages, compile their programs, and find the chunks that each stage reads
microbatch    run the stages forward and backward, and read chunks ahead
chunk_update  sum the gradients of chunks, reduce them to scalars, and update parameters and state chunk by chunk
"""
