"""``python -m moriio_vllm.demo``: the demo from the command line."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moriio_vllm.demo.baseline import baseline_answers
from moriio_vllm.demo.client import RequestError
from moriio_vllm.demo.model import MODEL_NAME, cache_dir, ensure_model
from moriio_vllm.demo.process import ServerError
from moriio_vllm.demo.prompts import PromptMaker
from moriio_vllm.demo.report import HEADER, Row, summary
from moriio_vllm.demo.stack import StackOptions, running_stack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moriio_vllm.demo.client import Answer
    from moriio_vllm.demo.prompts import Prompt


def say(line: str) -> None:
    """Print one line at once, also into a pipe."""
    print(line, flush=True)  # noqa: T201


def run_mode(options: StackOptions, prompts: Sequence[Prompt], expected: Sequence[Answer]) -> tuple[list[Row], int]:
    """Start the servers in one mode, send the prompts one after the other, and print each row as it comes.

    Returns:
        The rows, and the number of prompt tokens whose KV cache the decode server received.

    Raises:
        ServerError: a server ended or did not start.
        RequestError: a prompt was not answered.
    """
    say(f"\n{options.mode.upper()}: starting router, prefill and decode server; logs in {options.logs}")
    table: list[Row] = []
    with running_stack(options, say) as stack:
        say(HEADER)
        for prompt, answer in zip(prompts, expected, strict=True):
            row = Row(prompt, options.mode, stack.router.ask(prompt), answer)
            stack.check()
            say(row.line())
            table.append(row)
        moved = stack.tokens_received()
    return table, moved


def run(modes: Sequence[str], logs: Path) -> int:
    """Run the demo in ``modes`` and return the exit code: 0 when every answer is exact and was really moved."""
    started = time.monotonic()
    cache = cache_dir()
    say(f"model: {MODEL_NAME} in {cache}")
    model = ensure_model(cache)
    prompts = PromptMaker(model).demo()
    say(f"answers of a plain single server to {len(prompts)} prompts")
    expected = baseline_answers(prompts, StackOptions(model, logs), cache, say)
    table: list[Row] = []
    transferred: dict[str, int] = {}
    for mode in modes:
        rows, transferred[mode] = run_mode(StackOptions(model, logs, mode), prompts, expected)
        table += rows
    say("\n" + summary(table, transferred, time.monotonic() - started))
    return 0 if all(row.exact for row in table) and all(transferred.values()) else 1


def main() -> int:
    """Parse the command line, run, and turn a failure or Ctrl-C into a message and an exit code."""
    parser = argparse.ArgumentParser(prog="python -m moriio_vllm.demo", description=__doc__)
    parser.add_argument("--mode", choices=("write", "read", "both"), default="both", help="transfer mode to show")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs (default: a new temporary one)")
    args = parser.parse_args()
    logs = (args.logs or Path(tempfile.mkdtemp(prefix="moriio-demo-"))).absolute()
    logs.mkdir(parents=True, exist_ok=True)
    # SIGTERM unwinds as an exception does, so that every server is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return run(("write", "read") if args.mode == "both" else (args.mode,), logs)
    except KeyboardInterrupt:
        say("interrupted; all servers are ended")
        return 128 + signal.SIGINT
    except (ServerError, RequestError, OSError) as error:
        say(f"\nFAILED: {error}\nlogs are in {logs}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
