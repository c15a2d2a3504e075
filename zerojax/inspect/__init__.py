"""Read compiled programs and live arrays.

In reading order: `hlo` parses a program. `collectives` lists its collectives, and `pieces` separates them by operation.
`overlap` counts the products that hide each collective, `roofline` computes a lower bound on the time, and `timeline`
simulates the schedule. `memory` computes the program's memory. `report` counts the bytes of a state's arrays.
"""
