"""Compare the programs of several processes by the digest of their text, and name the first line that differs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable

from zerojax.comm.events import EVENTS
from zerojax.comm.processes import Processes
from zerojax.compat import is_users

LONGEST = 160
VALUE = re.compile(r"%\w+")


def require_same_program(what: str, as_text: Callable[..., str]) -> None:
    """Compare a lowered program with those of the other processes.

    Numbers that a function closes over are constants of the program, so another learning rate makes another program. If
    programs differ, every process raises a ValueError that names the first such line, and its line of Python. If a
    process compiles no such program, the others raise a TimeoutError.

    Args:
        what: What the program does, as a verb and its object.
        as_text: The method `as_text` of `jax.stages.Lowered`.
    """
    topic = f"compile the program of: {what}"
    processes = Processes("program", call=EVENTS.begin(topic))
    lines = as_text().splitlines()
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = processes.exchange(topic, digest)
    if len(set(digests)) == 1:
        return
    # A program may have megabytes of text, so processes send digests of all lines, and then the text of one line.
    # Lines are compared without names of values first: these are numbered, and a difference changes others far away.
    short = lambda line: hashlib.sha256(line.encode()).hexdigest()[:8]
    each = [(short(VALUE.sub("%", line)), short(line)) for line in lines]
    of_all = [json.loads(text) for text in processes.exchange("compare lines", json.dumps(each))]
    index = next(i for i, digest in enumerate(digests) if digest != digests[0])
    length = min(len(of_all[0]), len(of_all[index]))
    differ = [k for k in range(length) if of_all[0][k][0] != of_all[index][k][0]]
    differ += [k for k in range(length) if of_all[0][k] != of_all[index][k]]
    place = differ[0] if differ else length
    shown = [lines[place].strip() if place < len(lines) else "the end", origin(as_text, place)]
    said = [json.loads(text) for text in processes.exchange("compare one line", json.dumps(shown))]
    (first, where), (other, _) = said[0], said[index]
    first, other = around_difference(first, other)
    raise ValueError(
        f"The processes do not {what} alike: their programs differ{where}. On process {index}, unlike process 0, line "
        f"{place + 1} of the program is `{other}`, not `{first}`. A number that differs may be a learning rate, a "
        f"factor, a key or data that a function closes over. Give every process the same program, options, values "
        f"and shapes."
    )


def around_difference(one: str, other: str) -> tuple[str, str]:
    """Return the parts of two lines around the first character that differs."""
    same = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, same - LONGEST // 2)
    return one[start:][:LONGEST], other[start:][:LONGEST]


def origin(as_text: Callable[..., str], place: int) -> str:
    """Return the place in Python of a line of the program, or of the next line with a location; empty if unknown."""
    text = as_text(debug_info=True).splitlines()
    defined = [re.match(r"(#loc\d*) = (.*)", line) for line in text]
    places = {str(found[1]): str(found[2]) for found in defined if found is not None}
    body = [*(line for line in text if not line.startswith("#loc")), ""]
    place = min(place, len(body) - 1)
    # A constant has the place of the jitted call. The first line that reads the constant has a better one.
    if constant := re.match(r"\s*(%\w+) = stablehlo.constant", body[place]):
        uses = re.compile(rf"{re.escape(constant.group(1))}\b")
        place = next((i for i, line in enumerate(body[place + 1 :], place + 1) if uses.search(line)), place)
    for line in body[place : place + 8]:
        named = re.search(r"loc\((#loc\d*)\)", line)
        if named and (found := in_users_code(named.group(1), places)):
            return f" at {found}"
    return ""


def in_users_code(name: str, places: dict[str, str]) -> str:
    """Return the file and line of a location outside of libraries, or of the call in such a file that leads to it."""
    text = places.get(name, "")
    if (file := re.match(r'loc\("([^"]+)":(\d+):', text)) is not None:
        return f"{file.group(1)}:{file.group(2)}" if is_users(file.group(1)) else ""
    return next((found for inner in re.findall(r"#loc\d+", text) if (found := in_users_code(inner, places))), "")
