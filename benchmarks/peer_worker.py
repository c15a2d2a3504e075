"""Run one process of `peers.py`: one way of training, or one rank of it, which takes steps on demand.

Its argument is a JSON description of the work. It answers each line of standard input with a line of JSON, and blocks
until the next. Output of libraries goes to standard error.
"""

import ctypes
import json
import os
import resource
import sys
import time

STATUS, CLEAR = "/proc/self/status", "/proc/self/clear_refs"


def resident(field):
    """Bytes resident now (VmRSS) or at most (VmHWM); without /proc, at most since the start."""
    if not os.path.exists(STATUS):
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open(STATUS) as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def forget_peak():
    """Begin to count the peak anew, without what compiling left behind; whether this system can."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open(CLEAR, "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def trainer_of(asked):
    """The trainer, and the bytes that were resident before it: those of the framework."""
    import numpy as np

    if asked["framework"] == "jax":
        import peer_jax as framework

        options = {"scan": asked["style"] == "scan"}
        size = asked["size"]
    else:
        import peer_torch as framework

        options = {"rank": asked["rank"], "workers": asked["workers"]}
        size = asked["shape"]
        if asked["way"] == "deepspeed":
            import deepspeed  # noqa: F401
    before = resident("VmRSS")
    with np.load(asked["weights"]) as file:
        weights = dict(file)
    return framework.Trainer(asked["way"], size, weights, **options), before


def turn(trainer, order):
    """Steps in a row: their losses, when they began and ended, and the CPU's seconds until both."""
    wait = getattr(trainer, "wait", lambda: None)
    began = {"start": time.monotonic(), "cpu start": time.process_time()}
    losses = [trainer.step(order["first"] + i) for i in range(order["steps"])]
    wait()
    return {"losses": losses, **began, "end": time.monotonic(), "cpu end": time.process_time()}


def memory(trainer, before):
    peak = {"peak resident": resident("VmHWM"), "before the model": before}
    compiled = trainer.compiled_peak() if hasattr(trainer, "compiled_peak") else None
    return peak | {"compiled peak": compiled, "device peak": trainer.device_peak()}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**what):
        print(json.dumps(what), file=answers, flush=True)

    try:
        trainer, before = trainer_of(json.loads(sys.argv[1]))
        answer(ready=True)
        for line in sys.stdin:
            order = json.loads(line)
            match order["do"]:
                case "turn":
                    answer(**turn(trainer, order))
                case "forget peak":
                    answer(forgotten=forget_peak())
                case "memory":
                    answer(**memory(trainer, before))
                case "end":
                    break
        getattr(trainer, "end", lambda: None)()
    except BaseException as error:
        first = str(error).strip().splitlines() or [""]
        answer(error=f"{type(error).__name__}: {first[0]}")
        raise


if __name__ == "__main__":
    main()
