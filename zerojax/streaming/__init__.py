"""Update the optimizer state that is in host memory or on disk, chunk by chunk.

`zerojax.optim.partition` divides an update into groups. If a group's update is elementwise, its arrays are divided into
chunks. Otherwise its full arrays are one chunk. Read the files in this order:

    stream          `StreamedUpdate` updates all groups of one step, with a queue of chunks
    stores          fetches the state of a chunk from host memory or files, and writes the new state back
    chunk_programs  compiles the programs that update a chunk, on the device or on the host
    first_state     makes the state of a new run group by group, or adopts the state of a run without zerojax
"""
