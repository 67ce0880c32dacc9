"""Who gets past the handshake: the ZeroMQ authentication protocol (RFC 27, ZAP).

Invariant: a connection is admitted only by CURVE with the run's client key.
"""

import logging

import zmq
from zmq.utils import z85

logger = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"
_CURVE_REQUEST_FRAMES = 7


class Admission:
    """Answers libzmq's questions about newcomers.

    Attributes:
        socket: readable when a question waits; `decide` answers it.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", client_key: bytes) -> None:
        self._admitted = z85.decode(client_key)
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def decide(self) -> None:
        """Answer one question."""
        frames = self.socket.recv_multipart()
        version, request_id, _, address = frames[:4]
        mechanism, *credentials = frames[5:]
        admitted = (
            len(frames) == _CURVE_REQUEST_FRAMES
            and mechanism == b"CURVE"
            and credentials == [self._admitted]
        )
        if not admitted:
            logger.warning(
                "control board: refused a connection from %s: not this run's key",
                address.decode(errors="replace"),
            )
        code, text = (b"200", b"OK") if admitted else (b"400", b"not this run's key")
        self.socket.send_multipart((version, request_id, code, text, b"", b""))

    def close(self) -> None:
        """Stop answering."""
        self.socket.close()
