"""What the tests on the real engine need, made on demand under `.cache/mori`.

That is a Python 3.10 with AMD's wheel, and the software verbs built for it.
Each step leaves a stamp, so that a run that was interrupted goes on where it was.

    python -m tests.transport.mori.environment     prints the interpreter and the variables
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.transport.mori.softverbs import stubs

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CACHE = Path(os.environ.get("MORIIO_CACHE", ROOT / ".cache")) / "mori"
WHEEL = "amd_mori==1.2.4"
PACKAGES = (
    "numpy>=1.26",
    "attrs>=23.2",
    "msgspec>=0.18.6",
    "pyzmq>=25.1",
    "transitions>=0.9.3,<0.10",
    "pytest>=8.2,<10",
)
HEADER = "infiniband/verbs.h"


class MissingError(RuntimeError):
    """Something that the machine must have and has not; the text says what and how to get it."""


def run(*command: str | Path, **options: object) -> str:
    """Run a command; its output is in the error where it fails."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise MissingError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def find_python() -> Path:
    """A Python 3.10, as the wheel was built for it (its other build needs a newer glibc)."""
    given = os.environ.get("MORIIO_PYTHON310")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [given] if given else [shutil.which("python3.10"), *sorted(pyenv.glob("3.10*/bin/python"))]
    for candidate in filter(None, candidates):
        done = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.startswith("Python 3.10."):
            return Path(candidate)
    raise MissingError("no Python 3.10 (looked in PATH and ~/.pyenv/versions); install one or set MORIIO_PYTHON310")


def make_venv() -> Path:
    """The interpreter of an environment with the wheel in it."""
    venv = CACHE / "venv"
    stamp = venv / f".made-{hashlib.sha256(repr((WHEEL, PACKAGES)).encode()).hexdigest()[:12]}"
    python = venv / "bin" / "python"
    if not stamp.exists():
        shutil.rmtree(venv, ignore_errors=True)
        run(find_python(), "-m", "venv", venv)
        pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
        run(*pip, "--no-deps", WHEEL)
        run(*pip, *PACKAGES)
        stamp.touch()
    return python


def find_include() -> list[str]:
    """Where the verbs header lies, as arguments of the compiler; fetched from Debian's package where it is missing."""
    if Path("/usr/include", HEADER).exists():
        return []
    include = CACHE / "headers" / "usr" / "include"
    if not (include / HEADER).exists():
        folder = CACHE / "headers"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            try:
                run("apt-get", "download", "libibverbs-dev", cwd=folder)
            except MissingError:  # no lists of packages yet
                run("apt-get", "update", "-q")
                run("apt-get", "download", "libibverbs-dev", cwd=folder)
            run("dpkg", "-x", next(folder.glob("libibverbs-dev*.deb")), folder)
        except (OSError, MissingError) as error:
            raise MissingError(f"no {HEADER}, and no package libibverbs-dev to take it from: {error}") from error
    return ["-I", str(include)]


def make_libraries(python: Path) -> Path:
    """The folder of the software verbs and of stand-ins for what else the wheel links to."""
    compiler = shutil.which("gcc")
    if compiler is None or shutil.which("readelf") is None:
        raise MissingError("no gcc or readelf; install gcc and binutils")
    sources = sorted(path for path in (HERE / "softverbs").iterdir() if path.suffix in {".c", ".h", ".py"})
    digest = hashlib.sha256(WHEEL.encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    out = CACHE / f"softverbs-{digest}"
    if not (out / ".made").exists():
        for old in CACHE.glob("softverbs-*"):
            shutil.rmtree(old)
        wheel = Path(
            run(
                python, "-c", "import importlib.util as u; print(u.find_spec('mori').submodule_search_locations[0])"
            ).strip()
        )
        stubs.build(wheel, out, [compiler, *find_include()])
        (out / ".made").touch()
    return out


def variables() -> tuple[Path, dict[str, str]]:
    """The interpreter, and the environment in which it runs the real engine over software verbs.

    Raises:
        MissingError: says what this machine lacks.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    python = make_venv()
    libraries = make_libraries(python)
    path = os.pathsep.join(map(str, (HERE / "site", ROOT / "src", ROOT)))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MORI_", "PYTHON", "SOFTVERBS_"))}
    return python, {
        **kept,
        "MORIIO_SOFTVERBS": str(libraries),
        "PYTHONPATH": path,
        "SOFTVERBS_RETRY_MS": "300",  # a silent peer is given up fast
    }


if __name__ == "__main__":
    interpreter, environment = variables()
    for name in ("MORIIO_SOFTVERBS", "PYTHONPATH", "SOFTVERBS_RETRY_MS"):
        sys.stdout.write(f"{name}={environment[name]} ")
    sys.stdout.write(f"{interpreter}\n")
