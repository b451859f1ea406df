"""A router plans in this process, so that its own loop goes on: a job comes on standard input, an answer goes
to standard output, both pickled."""

import os
import pickle
import sys

from services.router.replay.following import plan

_NICENESS = 10


def main() -> None:
    os.nice(_NICENESS)
    job = pickle.load(sys.stdin.buffer)
    pickle.dump(plan(job), sys.stdout.buffer)


if __name__ == "__main__":
    main()
