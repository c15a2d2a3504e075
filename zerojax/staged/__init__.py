"""Run a training step as many programs. Parameters, gradients and optimizer state are in files.

model_files      read and write the files of parameters and gradients, and represent parameters in a tree by nodes
sources          find the chunks of the shard that a segment reads, and divide its gradient into chunks
program          divide a loss into stages, compile their programs, and find the order of reads
microbatch       run the stages forward and backward, and read chunks ahead
chunk_gradients  sum the gradients of chunks, scale the sums, reduce them to scalars, and write them to files
chunk_update     update parameters and optimizer state chunk by chunk
"""
