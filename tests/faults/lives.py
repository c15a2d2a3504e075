"""A run that dies and is begun again: `lives.py FOLDER WAY PROCESSES SEED ROUNDS`.

Each life is forked from this process, which has imported everything and used no device: so the fork is safe, and saves
the seconds that importing takes. A signal ends it at a random instant; the next goes on from what it saved.
"""

import os
import random
import re
import signal
import socket
import sys
import time
from pathlib import Path

import disturbed

HIDDEN = "returned a result with an exception set"  # what Python makes of Ctrl-C where C did not look for errors
LIMIT_S = 900  # for what hangs; the processors may have other work


class Child:
    """A forked process, and what it prints."""

    def __init__(self, log, work, *args):
        self.log, self.status = log, None
        log.unlink(missing_ok=True)  # of the life before
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            work(*args)
            sys.exit()

    @property
    def text(self):
        return self.log.read_text() if self.log.exists() else ""

    def ended(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def signal(self, number):
        if not self.ended():
            os.kill(self.pid, number)


def until(happened, seconds):
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def one_life(folder, way, processes, rng, number, seed):
    """Begin a run, and end it at a random instant; the text of its processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    several = [(i, port) for i in range(processes)] if processes > 1 else [()]
    seed = f"{seed}.{number}"  # of the faults: the same in all processes
    run = [Child(folder / f"{i}.log", disturbed.live, folder, way, seed, *one) for i, one in enumerate(several)]
    rounds, delay, how = rng.randint(0, 8), rng.uniform(0, 1), rng.choice(["SIGKILL", "SIGKILL", "SIGINT", "SIGTERM"])
    # of several processes one that is interrupted, or left alone, waits for the others
    most = 10 if processes == 1 or how == "SIGTERM" else 1
    hit, grace, beside = rng.sample(run, rng.randint(1, processes)), rng.choice([0, most]), rng.random() < 0.2
    awaited = f"round {rounds - 1}:" if rounds else "ready"
    began = until(lambda: all("ready" in one.text or one.ended() for one in run), LIMIT_S)
    reader = [Child(folder / "reader.log", disturbed.read, folder, way, processes)] if beside else []
    began &= until(lambda: awaited in run[0].text or any(one.ended() for one in run), LIMIT_S)
    time.sleep(delay)
    early = [one.status for one in run + reader if one.ended()]
    for one in hit:
        one.signal(getattr(signal, how))
    until(lambda: all(one.ended() for one in run), grace)
    for one in run + reader:
        one.signal(signal.SIGKILL)
        until(one.ended, LIMIT_S)
    texts = [one.text for one in run + reader]
    wrong = early or not began or any(re.search("AssertionError|Segmentation|Timeout!", text) for text in texts)
    interrupted = how == "SIGINT" and HIDDEN in run[0].text
    wrong = wrong or (processes == 1 and run[0].status not in (0, -signal.SIGINT, -signal.SIGKILL) and not interrupted)
    if wrong:
        print(*texts, sep="\n", file=sys.stderr, flush=True)
        ends = [text[-1500:] for text in texts]  # once more: of a long log only the end may be seen
        raise AssertionError(
            f"life {number}, {how} to {len(hit)}: began {began}, ended early {early}, {[one.status for one in run]}\n"
            + "\n".join(ends)
        )
    print(f"life {number}: {rounds} rounds, {how} to {len(hit)}{', read beside' * beside}: {[o.status for o in run]}")
    return texts[: len(run)]


def main(folder, way, processes, seed, rounds):
    folder, processes, rng = Path(folder), int(processes), random.Random(f"{way} {processes} {seed}")
    done, number, reported = 0, 0, (0, 0)
    while done < int(rounds):
        texts = one_life(folder, way, processes, rng, number, seed)
        saved = [[tuple(map(int, one)) for one in re.findall(r"saved (\d+) (\d+)\n", text)] for text in texts]
        begun = min(one[0] for one in saved if one) if any(saved) else reported
        assert begun >= reported, f"life {number}: {reported} was reported, and {begun} restored\n{texts}"
        reported = max([reported, *(step for one in saved for step in one)])
        done += 1 + texts[0].count("\nround ")
        number += 1
    print(f"{way}, {processes}: {done} rounds in {number} lives, 0 wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
