"""pytest in the environment of the real engine: `python -m tests.transport.mori.run [ARGUMENTS]`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from tests.transport.mori.environment import ROOT, variables

LIMIT_S = 600  # a hang of the engine must not be one of the tests


def run_pytest(arguments: Sequence[str]) -> tuple[int, str]:
    """Exit status and output.

    Raises:
        MissingError: says what this machine lacks.
    """
    python, environment = variables()
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


if __name__ == "__main__":
    status, output = run_pytest(sys.argv[1:] or ["-q", "tests/transport/mori/engine"])
    sys.stdout.write(output)
    sys.exit(status)
