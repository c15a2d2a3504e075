"""Read compiled programs and live arrays.

Read `hlo` first, which parses a program. `compiled_collectives` lists the program's collectives. `roofline.overlap`
adds the number of matrix products that run during each collective, and the property `hidden_share` of its result is
the share of the bytes that products hide. `roofline.roofline` computes the least time of the program, and `timeline`
simulates the program's schedule. `report` is about arrays: it counts the bytes of a state on each device.
"""
