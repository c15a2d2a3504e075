"""Read compiled programs and live arrays.

In reading order: `hlo` parses a program. `collectives` lists its collectives, and `pieces` separates them by operation.
`overlap` counts the products that hide each, `roofline` bounds the time from below, and `timeline` simulates the
schedule. `memory` has the program's memory. `report` counts bytes of live arrays, with their plans (`planned`), and
prints them as a tree (`report_tree`).
"""
