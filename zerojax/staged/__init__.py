"""Run a training step as many programs. Parameters, gradients and optimizer state are in files.

model_files      read and write the files of parameters and gradients, some of which stay in host memory
sources          make a segment's shard from a parameter's chunks, and divide the shard's gradient into chunks
stage            compile a segment into a forward and a backward program, which segments with equal equations share
program          divide a loss into stages; find the order of reads, and the number of gradients per chunk
microbatch       run the stages forward and backward, and read chunks ahead
chunk_gradients  sum the gradients of chunks, scale the sums, and write them to files
reductions       compute the scalars that the update reduces from gradients, such as norms, chunk by chunk
params_on_disk   write parameters to files, and represent them in a tree
chunk_update     update parameters and optimizer state chunk by chunk
"""
