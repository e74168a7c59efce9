"""Questions whose answer may end the process: `python -m moriio_vllm.doctor._probe verbs|rocm_smi|mori`.

The answer is printed as lines; whatever libraries say of themselves goes to standard error.
"""

from __future__ import annotations

import sys

from moriio_transport.base import TransportError
from moriio_transport.mori import preflight, verbs
from moriio_transport.mori.binding import load_library

__all__ = ["main"]


def _verbs_devices() -> None:
    for port in verbs.read_ports():
        sys.stdout.write(f"{port.device} {port.number} {port.state}\n")


def _rocm_smi() -> None:
    preflight.check_rocm_smi()
    sys.stdout.write("loads, and sees a GPU\n")


def _mori() -> None:
    sys.stdout.write(f"amd_mori {load_library().version}\n")


def main(question: str) -> int:
    """Answer; 1 with the reason where there is no answer."""
    try:
        {"verbs": _verbs_devices, "rocm_smi": _rocm_smi, "mori": _mori}[question]()
    except TransportError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
