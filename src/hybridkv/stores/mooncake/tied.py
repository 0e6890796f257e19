"""Runs a command that ends when the process that started it ends: ``python tied.py COMMAND ...``.

A script of its own, so that nothing has to run between fork and exec in a process with threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == parent:  # else it ended before the line above
        os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - as asked for
