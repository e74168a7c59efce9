"""The conformance suite against the real engine over software verbs."""

from moriio_transport.conformance import PeerProcessConformance, TransportConformance


class TestRdmaWithinOneProcess(TransportConformance):
    backend = "rdma"


class TestRdmaBetweenProcesses(PeerProcessConformance):
    backend = "rdma"


class TestRdmaOverFourQueuePairs(TransportConformance):
    backend = "rdma"
    options = {"qp_per_transfer": 4, "num_workers": 2, "transfer_chunking": True, "max_send_wr": 512}  # noqa: RUF012
