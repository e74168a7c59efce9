"""`moriio doctor --config`: the JSON that vLLM takes, ports, addresses, and the command itself."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest

from moriio_vllm import cli
from moriio_vllm.config import Ranks
from moriio_vllm.doctor import Finding, Host, Level, Plan, _configuration, _host

TREES = Path(__file__).parents[1] / "testdata" / "sysfs"


def config(**extra: object) -> str:
    """What vLLM gets as --kv-transfer-config."""
    ports = {"http_port": 0, "handshake_port": 0, "notify_port": 0} | dict(zip(
        ("http_port", "handshake_port", "notify_port"), free_runs(), strict=True))  # fmt: skip
    extra = {"backend": "loopback", "host_ip": "127.0.0.1", **ports, **extra}
    return json.dumps({"kv_connector": "MoRIIOConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra})


def free_runs(count: int = 3, each: int = 4) -> list[int]:
    """First ports of runs of ports that were free a moment ago."""
    found: list[int] = []
    first = 20_000
    while len(found) < count:
        if not any(_configuration._why_taken(port) for port in range(first, first + each)):
            found.append(first)
        first += each
    return found


def look(text: str, **ranks: int) -> list[Finding]:
    """The findings of the configuration check."""
    return list(_configuration.check(Host(), Plan.from_json(text, Ranks(**ranks), lambda: "127.0.0.1")))


def levels(findings: list[Finding]) -> dict[str, Level]:
    """Level by check."""
    return {finding.check: finding.level for finding in findings}


def test_good_configuration():
    """Free ports and an address of ours are all right; without proxy_ip the instance does not register."""
    assert levels(look(config())) == {
        "configuration": Level.OK, "handshake_port": Level.OK, "notify_port": Level.OK, "http_port": Level.OK,
        "host address": Level.OK, "router": Level.NOTE,
    }  # fmt: skip


def test_a_port_of_any_rank_that_is_taken():
    """Each rank has a port of its own, counting up; the one that is taken is named."""
    first = free_runs()[0]
    with closing(socket.create_server(("", first + 3))):
        found = {f.check: f for f in look(config(notify_port=first, handshake_port=free_runs(6)[5]), tp_size=4)}
        assert found["notify_port"].level is Level.FAIL
        assert found["notify_port"].seen == f"not free: {first + 3} (in use)"
        assert (
            levels(look(config(notify_port=first, handshake_port=free_runs(6)[5]), tp_size=3))["notify_port"]
            is Level.OK
        )


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("{", "no JSON"),
        ("[1]", "expected a JSON object"),
        ('{"kv_role": "kv_producer"}', "kv_connector_extra_config=None: expected an object"),
        (config(http_prot="1"), "http_prot='1': expected a known key; did you mean http_port?"),
        (config(backend="pigeon"), "backend='pigeon': expected one of"),
        (config(backend="rdma", chunk_bytes="many"), "chunk_bytes='many': expected"),
        ('{"kv_connector_extra_config": {}}', "kv_role='None': expected"),
    ],
)
def test_bad_configuration_is_a_finding(text, seen):
    """Whatever is wrong is said as vLLM would say it at start, and nothing else of it is tried."""
    (finding,) = look(text)
    assert finding.level is Level.FAIL
    assert seen in finding.seen


def test_address_that_is_not_ours():
    """Peers would be told an address that does not lead here."""
    found = {f.check: f for f in look(config(host_ip="192.0.2.1"))}
    assert found["host address"].level is Level.FAIL
    assert "192.0.2.1 is no address of this machine" in found["host address"].seen


def test_loopback_announced_to_a_router_elsewhere(monkeypatch):
    """The router cannot reach 127.0.0.1 of another host; the address of the route is advised."""
    monkeypatch.setattr(_configuration, "_route_to", lambda *_: "127.0.0.9")
    found = {f.check: f for f in look(config(proxy_ip="127.0.0.1", proxy_ping_port=9))}
    assert found["route to router"].level is Level.FAIL
    assert found["route to router"].advice.startswith("set host_ip to 127.0.0.9")


def test_router_that_answers_and_one_that_does_not():
    """The router may be started later, so that it does not answer is a warning."""
    with closing(socket.create_server(("127.0.0.1", 0))) as router:
        port = router.getsockname()[1]
        text = config(proxy_ip="127.0.0.1", proxy_ping_port=port)
        assert levels(look(text))["router"] is Level.OK
    found = levels(look(text))
    assert (found["router"], found["route to router"]) == (Level.WARN, Level.OK)


def test_command_prints_text_or_json_and_gives_the_exit_code(monkeypatch, capsys):
    """The same findings in both forms, exit code 1 for a machine that lacks something, 0 for one that does not."""
    for tree, code in (("thor2", 0), ("thor2-abi", 1)):
        monkeypatch.setattr(cli, "Host", lambda tree=tree: Host(TREES / tree))
        assert cli.main(["doctor", "--json"]) == code
        data = json.loads(capsys.readouterr().out)
        assert data["exit_code"] == code
        assert cli.main(["doctor"]) == code
        assert all(row["seen"] in capsys.readouterr().out for row in data["findings"][-1:])


def test_command_takes_the_configuration(monkeypatch, capsys):
    """With a configuration its backend decides what counts."""
    monkeypatch.setattr(cli, "Host", lambda: Host(TREES / "bare"))
    assert cli.main(["doctor", "--config", config(backend="rdma")]) == 1
    assert cli.main(["doctor", "--json", "-tp", "2", "--config", config(backend="xgmi")]) == 1
    text = capsys.readouterr().out
    assert "kv_producer, WRITE, backend xgmi" in text


def test_command_refuses_wrong_arguments(capsys):
    """An unknown subcommand or option is exit code 2."""
    for arguments in ([], ["surgeon"], ["doctor", "--depth", "3"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(arguments)
    assert "doctor" in capsys.readouterr().err


def test_questions_are_asked_in_a_process_of_their_own():
    """A question that this machine cannot answer is an answer with a reason and a status, not our end."""
    answer = Host().probe("verbs")
    assert answer.status in (0, 1)
    assert answer.status == 0 or answer.warnings


def test_question_that_is_never_answered(monkeypatch):
    """Libraries that hang at import are given up."""
    monkeypatch.setattr(_host, "PROBE_S", 0.01)
    assert Host().probe("mori").warnings == ("no answer in 0.01 s",)
    assert "moriio_vllm.doctor._probe" not in sys.modules
