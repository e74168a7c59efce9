"""The command `moriio`: one subcommand each for what an operator does beside `vllm serve`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from moriio_vllm.config import Ranks
from moriio_vllm.doctor import Host, Plan, as_json, as_text, default_host, examine, exit_code

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine, and a configuration, before vLLM is started",
        description="Looks at RDMA devices, NIC drivers, limits, GPUs, libraries and a configuration, and says what to "
        "do. Exit code 0: nothing fails; 1: something does; 2: wrong arguments.",
    )
    parser.add_argument("--config", metavar="JSON", help="what vLLM gets as --kv-transfer-config")
    parser.add_argument("--backend", help="without --config: the backend that is to run (default rdma)", default="rdma")
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N")
    parser.add_argument("--data-parallel-size-local", "-dpl", type=int, default=1, metavar="N")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    dp, tp = arguments.data_parallel_size_local, arguments.tensor_parallel_size
    plan = Plan(backend=arguments.backend)
    if arguments.config is not None:
        plan = Plan.from_json(arguments.config, Ranks(dp_size=dp, dp_size_local=dp, tp_size=tp), default_host)
    findings = examine(Host(), plan)
    print(as_json(findings) if arguments.json else as_text(findings))
    return exit_code(findings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit code."""
    parser = argparse.ArgumentParser(prog="moriio", description="Tools of the MoRIIO connector.")
    _add_doctor(parser.add_subparsers(required=True, metavar="COMMAND"))
    parsed = parser.parse_args(arguments)
    return int(parsed.run(parsed))


if __name__ == "__main__":
    sys.exit(main())
