"""Store the optimizer state in few bytes per parameter: `zero_shard(..., state=Narrow("int8"))`."""
