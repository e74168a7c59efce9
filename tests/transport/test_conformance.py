"""The conformance suite, run against the loopback transport in each of its forms."""

from moriio_transport.conformance import PeerProcessConformance, TransportConformance


class TestLoopbackWithinOneProcess(TransportConformance):
    backend = "loopback"


class TestLoopbackBetweenProcesses(PeerProcessConformance):
    backend = "loopback"


class TestLoopbackWithTwoCopyThreads(PeerProcessConformance):
    backend = "loopback"
    options = {"num_workers": 2}  # noqa: RUF012
