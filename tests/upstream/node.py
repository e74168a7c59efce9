"""A node that behaves on the wire as vLLM's built-in connector does, without vLLM: real ports, real memory.

It is as strict as the original: a frame that would end one of its listener threads is kept in `ended_by`.
"""

from __future__ import annotations

import threading

import msgpack
import numpy as np
import zmq

from tests.transport.nodes import HOST, eventually
from tests.upstream import strict
from tests.upstream.path.mori import io as mori

LAYERS = 4


class _Tensor:
    """What the engine asks of a tensor, over a numpy array."""

    def __init__(self, array):
        self._array = array

    def nelement(self):
        return self._array.size

    def element_size(self):
        return self._array.itemsize

    def data_ptr(self):
        return self._array.ctypes.data


class UpstreamNode:
    """One rank: `role` is "P" or "D"; all layers lie one after the other in one allocation."""

    def __init__(self, role, ports, *, blocks=256, block_bytes=1024, newer=False, lead=512):
        self.role, self.newer, self.ports = role, newer, ports
        self.num_blocks, self.block_bytes = blocks, block_bytes
        self._lead = lead  # the layers begin somewhere inside the registered memory
        self._all = np.random.default_rng(ord(role)).integers(0, 256, lead + LAYERS * blocks * block_bytes, np.uint8)
        self.memory = self._all[lead:].reshape(LAYERS, blocks, block_bytes)
        self.engine = mori.IOEngine(f"{role}:{ports}", mori.IOEngineConfig(HOST, 1))
        self.region = self.engine.register_torch_tensor(_Tensor(self._all))
        self.frames = []  # as they came to the notify port
        self.seen = {}  # transfer id -> fields of its last message
        self.ended_by = None
        self._context = zmq.Context()
        self._dealers = {}
        ready = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(5)

    def close(self):
        self._context.destroy(linger=0)
        self._thread.join(5)
        self.engine.close()

    def hello(self):
        """The two messages of the handshake's answer."""
        names = [f"layer.{i}" for i in range(LAYERS)]
        stride = self.num_blocks * self.block_bytes
        base = self.region.data + self._lead
        first = {
            "engine_id": f"{HOST}:{self.ports[0]}", "agent_metadata": self.engine.get_engine_desc().pack(),
            "kv_caches_base_addr": [base + i * stride for i in range(LAYERS)], "num_blocks": self.num_blocks,
            "block_len": self.block_bytes, "attn_backend_name": "CPU_ATTN",
        }  # fmt: skip
        if self.newer:
            first["attention_block_sizes"] = dict.fromkeys(names, 16)
        return msgpack.dumps(first), msgpack.dumps({name: [self.region.pack()] for name in names})

    def _listen(self, ready):
        sockets = [self._context.socket(zmq.ROUTER) for _ in range(2)]
        for socket, port in zip(sockets, self.ports, strict=True):
            socket.bind(f"tcp://{HOST}:{port}")
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        ready.set()
        try:
            while True:
                for socket, _ in poller.poll():
                    identity, *rest = socket.recv_multipart()
                    self._handle(socket, identity, rest, handshake=socket is sockets[0])
        except zmq.ZMQError:  # the context was destroyed
            pass

    def _handle(self, socket, identity, rest, *, handshake):
        try:
            if len(rest) != 1:
                raise strict.ListenerEndedError(f"{len(rest)} frames")
            if handshake:
                if rest[0] != strict.GET_META:
                    raise strict.ListenerEndedError(f"handshake {rest[0]!r}")
                for payload in self.hello():
                    socket.send_multipart([identity, b"", payload])
                return
            self.frames.append(rest[0])
            fields = strict.notify(rest[0], self.role, newer=self.newer)
            self.seen[fields["transfer_id"]] = fields
        except strict.ListenerEndedError as error:
            self.ended_by = error

    # --- what upstream does ---------------------------------------------------------------------------------------

    def wait(self, transfer_id):
        """The peer's last message of a transfer."""
        eventually(lambda: transfer_id in self.seen or self.ended_by is not None)
        assert self.ended_by is None
        return self.seen[transfer_id]

    def send(self, peer, fields):
        """One frame to a peer's notify port."""
        if peer not in self._dealers:
            self._dealers[peer] = self._context.socket(zmq.DEALER)
            self._dealers[peer].connect(f"tcp://{HOST}:{peer.notify_port}")
        self._dealers[peer].send(msgpack.dumps(fields))

    def shake(self, peer):
        """Dial a peer; its first message and its layers."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(f"tcp://{HOST}:{peer.handshake_port}")
            socket.send(strict.GET_META)
            answers = []
            for _ in range(2):
                empty, payload = socket.recv_multipart()
                assert empty == b""
                answers.append(msgpack.loads(payload))
        return answers

    def move(self, peer, local, remote, *, write):
        """Copy blocks pairwise as upstream computes them: its own block stride on both sides."""
        assert len(local) <= len(remote), "local_block_ids longer than remote_block_ids"
        first, layers = self.shake(peer)
        self.engine.register_remote_engine(mori.EngineDesc.unpack(first["agent_metadata"]))
        statuses = []
        for i in range(LAYERS):
            target = mori.MemoryDesc.unpack(layers[f"layer.{i}"][0])
            session = self.engine.create_session(self.region, target)
            ours = self._lead + i * self.num_blocks * self.block_bytes
            theirs = first["kv_caches_base_addr"][i] - target.data
            pairs = list(zip(local, remote, strict=False))
            columns = (
                [ours + a * self.block_bytes for a, _ in pairs], [theirs + b * self.block_bytes for _, b in pairs],
                [self.block_bytes] * len(pairs),
            )  # fmt: skip
            statuses.append((session.batch_write if write else session.batch_read)(*columns, 0))
        eventually(lambda: all(s.Succeeded() or s.Failed() for s in statuses))
        assert all(s.Succeeded() for s in statuses), statuses[0].Message()
