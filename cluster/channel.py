"""An authenticated connection between two processes of a replica: whole messages over TCP.

    listener -> connector   MAGIC, 32 random bytes
    connector -> listener   MAGIC, 32 random bytes
    both ways, any number   length of the payload (4 bytes, big-endian), tag (16 bytes), payload

The tag is an HMAC-SHA256 of the frame's number and payload. Its key comes from the replica's token, both random numbers
and the direction, so that no frame can be forged, repeated or reordered by who does not know the token. Nothing is
encrypted: like the network that the devices' collectives use, the one between the hosts of a replica must be private.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading

MAGIC = b"jax-serve replica 1\n"
MAX_FRAME_BYTES = 1 << 26
"""A longer frame is no step plan, but something else that speaks on this port."""

_NONCE_BYTES = 32
_TAG_BYTES = 16
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")


class Channel:
    """One end of a connection. Any thread may send; one thread at a time receives.

    `timeout_s` is the longest silence that `receive` bears, and the longest that `send` waits for the other end to take
    what it is sent. Where either is over, or the connection is, they raise `OSError` (`TimeoutError`,
    `ConnectionError`) that says so.
    """

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        """Use `accept` or `connect`."""
        self._socket = sock
        self._send_key, self._receive_key = send_key, receive_key
        self._send_lock = threading.Lock()
        self._num_sent = self._num_received = 0
        host, port = sock.getpeername()[:2]
        self.address = f"{host}:{port}"
        """Of the other end."""
        self.host: str = host

    @classmethod
    def accept(cls, sock: socket.socket, token: str, timeout_s: float) -> "Channel":
        """The listener's end. Takes over `sock`, and closes it where the other end does not speak this protocol."""
        return cls._shake_hands(sock, token, timeout_s, listens=True)

    @classmethod
    def connect(cls, host: str, port: int, token: str, timeout_s: float) -> "Channel":
        """The connector's end. That the token is the right one shows with the first frame."""
        sock = socket.create_connection((host, port), timeout_s)
        return cls._shake_hands(sock, token, timeout_s, listens=False)

    @classmethod
    def _shake_hands(cls, sock: socket.socket, token: str, timeout_s: float, listens: bool) -> "Channel":
        try:
            sock.settimeout(timeout_s)
            # A step plan is one small frame that the other end waits for.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(MAGIC + mine)
            greeting = _receive_exactly(sock, len(MAGIC) + _NONCE_BYTES)
            if not greeting.startswith(MAGIC):
                raise ConnectionError("the other end does not speak the protocol of a replica's hosts")
            theirs = greeting[len(MAGIC) :]
            nonces = mine + theirs if listens else theirs + mine
            down, up = (_key(token, nonces, direction) for direction in (b"down", b"up"))
            return cls(sock, down, up) if listens else cls(sock, up, down)
        except BaseException:
            sock.close()
            raise

    def set_timeout(self, timeout_s: float) -> None:
        """From now on."""
        self._socket.settimeout(timeout_s)

    def send(self, payload: bytes) -> None:
        """Sends one message."""
        with self._send_lock:
            tag = _tag(self._send_key, self._num_sent, payload)
            self._num_sent += 1
            self._socket.sendall(_LENGTH.pack(len(payload)) + tag + payload)

    def receive(self) -> bytes:
        """The next message. Raises `ConnectionError` where it was not sent by who knows the token, too."""
        header = _receive_exactly(self._socket, _LENGTH.size + _TAG_BYTES)
        (length,) = _LENGTH.unpack_from(header)
        if length > MAX_FRAME_BYTES:
            raise ConnectionError(f"a message of {length} bytes; the longest has {MAX_FRAME_BYTES}")
        payload = _receive_exactly(self._socket, length)
        expected = _tag(self._receive_key, self._num_received, payload)
        if not hmac.compare_digest(expected, header[_LENGTH.size :]):
            raise ConnectionError("a message was not made with this replica's token")
        self._num_received += 1
        return payload

    def close(self) -> None:
        """Ends the connection; a thread in `receive` hears of it at once."""
        # The other end may have been faster.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = sock.recv(min(num_bytes, 1 << 20))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _key(token: str, nonces: bytes, direction: bytes) -> bytes:
    return hmac.digest(token.encode(), direction + nonces, hashlib.sha256)


def _tag(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + payload, hashlib.sha256)[:_TAG_BYTES]
