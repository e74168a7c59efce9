"""`moriio doctor` on recorded machines: what it finds and what it advises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moriio_vllm.doctor import Finding, Host, Level, Plan, as_json, as_text, examine, exit_code
from moriio_vllm.doctor._nic import TESTED

TREES = Path(__file__).parents[1] / "testdata" / "sysfs"


def look(tree: str, backend: str = "rdma") -> list[Finding]:
    """All findings on one of the recorded machines."""
    return examine(Host(TREES / tree), Plan(backend=backend))


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    """What fails: check and what was seen."""
    return [(finding.check, finding.seen) for finding in findings if finding.level is Level.FAIL]


def of(findings: list[Finding], check: str) -> list[Finding]:
    """The findings of one check."""
    return [finding for finding in findings if finding.check == check]


def test_machine_as_tested_is_all_right():
    """A machine with the tested releases has no finding that fails or warns, and the exit code is 0."""
    findings = look("thor2")
    assert {finding.level for finding in findings} == {Level.OK}, as_text(findings)
    assert exit_code(findings) == 0
    assert [finding.seen for finding in of(findings, "xGMI links")] == ["between all GPUs"]


def test_provider_of_another_abi():
    """The warning of the guide's troubleshooting is read, and both numbers and the way out are shown once."""
    findings = look("thor2-abi")
    seen = "bnxt_re: kernel driver has ABI 6, the installed library supports 1 to 1"
    assert bad(findings) == [
        ("userspace provider", seen),
        ("libibverbs", "does not see rdma0, rdma1, which the kernel has"),
    ]
    (two,) = of(findings, "Thor2 (Broadcom) provider")
    assert two.level is Level.WARN
    assert two.seen.startswith("two are installed: /usr/lib/x86_64-linux-gnu/libibverbs/libbnxt_re-rdmav34.so")
    assert all(finding.advice for finding in findings if finding.level in (Level.FAIL, Level.WARN))
    assert exit_code(findings) == 1


def test_older_ainic_and_low_limits():
    """Versions are compared with the tested ones; a low memlock limit and a missing library fail."""
    findings = look("ainic-old")
    assert [check for check, _ in bad(findings)] == ["memlock limit", "amd_mori"]
    nic = TESTED[0].nic
    assert [finding.seen for finding in findings if finding.check.startswith(nic) and finding.level is Level.WARN] == [
        "ionic 25.11.1.001, tested was 26.03.3.001",
        "libionic1 54.0-149.g3304be71, tested was 54.0-187-1",
    ]
    (links,) = of(findings, "xGMI links")
    assert (links.level, links.seen) == (Level.NOTE, "none between nodes 1-3")


def test_xgmi_needs_the_fabric_and_no_nic():
    """For backend xgmi missing links fail, and what only RDMA needs is no more than a note."""
    findings = look("ainic-old", "xgmi")
    assert bad(findings)[0] == ("xGMI links", "none between nodes 1-3")
    assert of(findings, "memlock limit")[0].level is Level.NOTE
    assert "RDMA devices" not in [check for check, _ in bad(look("bare", "xgmi"))]


def test_port_down_is_the_abort_of_the_guide():
    """Without an active port the finding names the assertion that MoRI-IO would fail."""
    findings = look("port-down")
    assert bad(findings) == [("RDMA port", "no port is ACTIVE: MoRI-IO aborts with availDevices.size() > 0")]
    assert of(findings, "memlock limit")[0].seen == "65536 bytes, but CAP_IPC_LOCK lifts it"


def test_loopback_needs_only_the_permission_to_trace():
    """A machine without NIC and GPU runs loopback, if its tracing policy lets it."""
    assert bad(look("bare", "loopback")) == [("ptrace_scope", "2: no process may copy from or to another")]
    checks = [check for check, _ in bad(look("bare"))]
    assert checks == ["RDMA devices", "/dev/kfd", "/dev/dri", "GPUs", "ROCm", "ROCm SMI", "amd_mori"]


def test_device_files_without_access(monkeypatch):
    """Files that the user may not open are named with the groups that may."""
    monkeypatch.setattr(Host, "usable", lambda *_: False)
    findings = look("thor2")
    assert ("/dev/infiniband", "no access to uverbs0, uverbs1") in bad(findings)
    assert ("/dev/kfd", "no access to /dev/kfd") in bad(findings)
    assert "--group-add render" in of(findings, "/dev/dri")[0].advice


@pytest.mark.parametrize("said", ["libibverbs: Warning: couldn't load driver 'libionic-rdmav34.so': no such file"])
def test_provider_that_cannot_be_loaded(monkeypatch, said):
    """A provider that is configured and cannot be loaded is named."""
    host = Host(TREES / "thor2")
    host._probes["verbs"]["warnings"] = [said]
    findings = examine(host, Plan())
    assert ("userspace provider", "libibverbs cannot load the library of libionic-rdmav34.so") in bad(findings)


def test_text_and_json_say_the_same():
    """Every finding is in both forms, advice included, and JSON carries the exit code."""
    findings = look("thor2-abi")
    shown, data = as_text(findings), json.loads(as_json(findings))
    assert data["exit_code"] == 1
    assert [row["check"] for row in data["findings"]] == [finding.check for finding in findings]
    for finding, row in zip(findings, data["findings"], strict=True):
        assert (row["level"], row["seen"], row["advice"]) == (finding.level.value, finding.seen, finding.advice)
        assert finding.seen in shown
        assert finding.advice in shown
    assert shown.endswith("1 warn, 2 fail")
