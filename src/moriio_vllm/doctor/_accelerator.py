"""GPUs: device files, the links between them, ROCm and amd_mori."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moriio_vllm.doctor._report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moriio_vllm.doctor._host import Host
    from moriio_vllm.doctor._plan import Plan

__all__ = ["check"]

_NODES: Final = "/sys/class/kfd/kfd/topology/nodes"
_XGMI: Final = "11"  # HSA_IOLINK_TYPE_XGMI


def check(host: Host, plan: Plan) -> Iterator[Finding]:
    """Files, GPUs, fabric and software; loopback needs none of them."""
    bad = plan.unless_needed("rdma", "xgmi")
    yield from _files(host, bad)
    yield from _gpus(host, plan, bad)
    version = host.read("/opt/rocm/.info/version")
    if version:
        yield Finding("ROCm", Level.OK, version)
    else:
        yield Finding("ROCm", bad, "no /opt/rocm/.info/version", "use a ROCm image of vLLM, or install ROCm")
    for what, question, advice in (
        ("ROCm SMI", "rocm_smi", "install rocm-smi-lib, and pass /dev/kfd and /dev/dri"),
        ("amd_mori", "mori", "pip install amd_mori, in the Python that runs vLLM; it needs ROCm's libraries"),
    ):
        answer = host.probe(question)
        if answer.status == 0 and answer.lines:
            yield Finding(what, Level.OK, answer.lines[-1])
        else:
            last = answer.warnings[-1] if answer.warnings else f"ended the process with status {answer.status}"
            yield Finding(what, bad, last, advice)


def _files(host: Host, bad: Level) -> Iterator[Finding]:
    renders = [f"/dev/dri/{name}" for name in host.names("/dev/dri") if name.startswith("render")]
    for what, files, option in (
        ("/dev/kfd", ["/dev/kfd"], "--device /dev/kfd"),
        ("/dev/dri", renders, "--device /dev/dri"),
    ):
        missing = not files or not host.path(files[0]).exists()
        locked = [path for path in files if not missing and not host.usable(path)]
        if missing:
            yield Finding(what, bad, "missing", f"load amdgpu on the host; start the container with {option}")
        elif locked:
            advice = "add the user to the groups video and render (docker: --group-add video --group-add render)"
            yield Finding(what, bad, f"no access to {', '.join(locked)}", advice)
        else:
            yield Finding(what, Level.OK, "usable")


def _properties(text: str) -> dict[str, str]:
    return dict(line.split(None, 1) for line in text.splitlines() if len(line.split(None, 1)) == 2)


def _gpus(host: Host, plan: Plan, bad: Level) -> Iterator[Finding]:
    gpus = [node for node in host.names(_NODES) if host.read(f"{_NODES}/{node}/gpu_id") not in ("", "0")]
    if not gpus:
        yield Finding("GPUs", bad, "the kernel shows none", "load amdgpu on the host and pass /dev/kfd and /dev/dri")
        return
    yield Finding("GPUs", Level.OK, f"{len(gpus)}")
    apart = []
    for gpu in gpus:
        links = (
            _properties(host.read(f"{_NODES}/{gpu}/io_links/{link}/properties"))
            for link in host.names(f"{_NODES}/{gpu}/io_links")
        )
        reached = {link.get("node_to") for link in links if link.get("type") == _XGMI}
        apart += [f"{gpu}-{other}" for other in gpus if gpu < other and other not in reached]
    if apart and len(gpus) > 1:
        advice = "between these GPUs use backend rdma" if plan.backend == "xgmi" else ""
        yield Finding("xGMI links", plan.unless_needed("xgmi"), f"none between nodes {', '.join(apart)}", advice)
    elif len(gpus) > 1:
        yield Finding("xGMI links", Level.OK, "between all GPUs")
