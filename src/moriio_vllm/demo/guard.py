"""Run one command so that nothing of it outlives us: ``python guard.py GRACE_SECONDS COMMAND...``.

A server forks helpers, which fork again. The guard stands between us and them: it adopts every orphan among its
descendants (``PR_SET_CHILD_SUBREAPER``), and ends all of them when its standard input reaches end of file. Our end of
that pipe closes when we close it and just as well when we are killed: not even ``kill -9`` of the demo leaves a server
behind. Should the guard itself be killed, the kernel kills the command (``PR_SET_PDEATHSIG``).

The file runs on its own (``python -I -S guard.py``), without the package around it, so that it starts in a few
milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    """Call prctl(2).

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def descendants(pid: int) -> list[int]:
    """Return the ids of all living descendants of process ``pid``, parents before their children."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def _kill_descendants() -> None:
    """Kill and reap everything below this process, again until nothing is left: a fork may race with one round."""
    while pids := descendants(os.getpid()):
        for pid in pids:
            # One that has ended since it was listed needs no signal.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own, so that a terminal's Ctrl-C reaches it only through us."""
    return subprocess.Popen(  # noqa: S603 - the command is our own argument
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # The guard has one thread, so running Python between fork and exec is safe here.
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
    )


def _wait(child: subprocess.Popen[bytes], wakeup: int, grace_s: float) -> None:
    """Return when ``child`` has ended, by itself or asked to because standard input closed or a signal came."""
    pidfd = os.pidfd_open(child.pid)
    events = select.poll()
    events.register(pidfd, select.POLLIN)
    events.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    events.register(wakeup, select.POLLIN)
    if any(fd == pidfd for fd, _ in events.poll()):
        return
    os.killpg(child.pid, signal.SIGTERM)
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    ended.poll(grace_s * 1000)


def main() -> int:
    """Run the command to its end and return its exit code (128 + the signal that ended it)."""
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    child = _start(command)
    _wait(child, wakeup_read, grace_s)
    code = child.poll()
    _kill_descendants()
    if code is None:
        # It did not end within its grace and was killed (and reaped) with the rest.
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
