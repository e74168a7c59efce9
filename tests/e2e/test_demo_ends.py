"""The demo that is cut short while its servers start leaves none of them behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moriio_vllm.demo.guard import descendants

pytestmark = pytest.mark.e2e

DEADLINE_S = 60


def processes_in(folder):
    """The ids of all processes whose working directory is ``folder``, where the demo's servers run."""
    found = []
    for cwd in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if cwd.readlink() == folder:
                found.append(int(cwd.parent.name))
        except OSError:  # it ended while we looked
            continue
    return found


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGINT, 128 + signal.SIGINT),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_demo_cut_short_leaves_no_process(sent, code, tmp_path, expected):
    """After Ctrl-C, SIGTERM or SIGKILL in the middle of the start, no process of the demo is left."""
    command = [sys.executable, "-m", "moriio_vllm.demo", "--mode=write", f"--logs={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as demo:
        assert any(line.startswith("decode: reading the model's configuration") for line in demo.stdout)
        assert processes_in(tmp_path)
        running = [os.pidfd_open(pid) for pid in descendants(demo.pid)]
        demo.send_signal(sent)
        assert demo.wait(DEADLINE_S) == code
        for fd in running:
            assert select.select([fd], [], [], DEADLINE_S)[0]
            os.close(fd)
    assert processes_in(tmp_path) == []
