"""Both ends of a connection in one process."""

import socket
from concurrent.futures import ThreadPoolExecutor

from cluster.channel import Channel


def connected(timeout_s: float = 30.0, tokens: tuple[str, str] = ("secret", "secret")) -> tuple[Channel, Channel]:
    """(the listener's end, the connector's end)"""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        host, port = listener.getsockname()
        connector = pool.submit(Channel.connect, host, port, tokens[1], timeout_s)
        sock, _ = listener.accept()
        return Channel.accept(sock, tokens[0], timeout_s), connector.result()
