"""Read compiled programs and live arrays.

In reading order: `hlo` parses a program. `compiled_collectives` lists its collectives, and separates combined ones.
`roofline` counts the products that hide each collective, and computes a lower bound on the time. `timeline`
simulates the schedule. `report` counts the bytes of a state's arrays.
"""
