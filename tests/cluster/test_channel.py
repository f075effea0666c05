"""Messages arrive whole, in order, from who knows the token, and never later than the timeout says."""

import socket
import struct
import threading

import pytest

from cluster.channel import MAGIC, MAX_FRAME_BYTES, Channel

from .connections import connected


@pytest.fixture
def ends():
    ends = connected()
    yield ends
    for end in ends:
        end.close()


class Tap:
    """Stands between two ends and may change what passes, once hands are shaken."""

    def __init__(self, change):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._change = change

    def connect(self, server):
        result = []

        def run():
            near, _ = self._listener.accept()
            far = socket.create_connection(server.getsockname())
            with near, far:
                for source, target in [(far, near), (near, far)]:
                    target.sendall(source.recv(len(MAGIC) + 32, socket.MSG_WAITALL))
                frame = near.recv(1 << 16)
                far.sendall(self._change(frame))
                result.append(near.recv(1))  # until the test ends

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return Channel.connect(*self._listener.getsockname(), "secret", 30.0), thread

    def close(self):
        self._listener.close()


def received_through(change):
    """What the listener makes of the connector's messages, b"hello" and then nothing, changed on their way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        tap = Tap(change)
        accepted = []
        accept = threading.Thread(
            target=lambda: accepted.append(Channel.accept(server.accept()[0], "secret", 30.0)), daemon=True
        )
        accept.start()
        connector, thread = tap.connect(server)
        accept.join()
        connector.send(b"hello")
        try:
            first = accepted[0].receive()
            return first, accepted[0].receive()
        finally:
            connector.close()
            accepted[0].close()
            thread.join()
            tap.close()


def test_messages_of_any_length_pass_both_ways_in_order(ends):
    messages = [b"", b"x", bytes(range(256)) * 5000, b"last"]
    for source, target in [ends, ends[::-1]]:
        sender = threading.Thread(target=lambda source=source: [source.send(m) for m in messages])
        sender.start()
        assert [target.receive() for _ in messages] == messages
        sender.join()


def test_threads_may_send_together(ends):
    senders = [
        threading.Thread(target=lambda i=i: [ends[0].send(bytes([i]) * 3000) for _ in range(20)]) for i in range(5)
    ]
    for sender in senders:
        sender.start()
    received = [ends[1].receive() for _ in range(100)]
    for sender in senders:
        sender.join()
    assert sorted(received) == [bytes([i]) * 3000 for i in range(5) for _ in range(20)]


def test_another_token_is_refused():
    ends = connected(tokens=("secret", "guess"))
    for source, target in [ends, ends[::-1]]:
        source.send(b"hello")
        with pytest.raises(ConnectionError, match="not made with this replica's token"):
            target.receive()
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame[:-1] + b"0",
        lambda frame: frame[:4] + bytes(16) + frame[20:],
        lambda frame: frame + frame,
    ],
    ids=["another payload", "another tag", "sent twice"],
)
def test_a_frame_that_was_changed_or_repeated_on_its_way_is_refused(change):
    with pytest.raises(ConnectionError, match="not made with this replica's token"):
        received_through(change)


def test_a_frame_that_is_too_long_is_refused_before_it_is_read():
    with pytest.raises(ConnectionError, match=f"a message of {MAX_FRAME_BYTES + 1} bytes"):
        received_through(lambda frame: struct.pack(">I", MAX_FRAME_BYTES + 1) + frame[4:])


def test_what_speaks_another_protocol_is_refused_and_its_socket_closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\nhost: a-host-with-a-name-that-is-long\r\n\r\n")
            sock, _ = server.accept()
            with pytest.raises(ConnectionError, match="does not speak the protocol"):
                Channel.accept(sock, "secret", 30.0)
        assert sock.fileno() == -1


def test_silence_is_a_timeout_and_an_end_says_so(ends):
    ends[0].set_timeout(0.01)
    with pytest.raises(TimeoutError):
        ends[0].receive()
    ends[0].set_timeout(30.0)
    ends[1].close()
    with pytest.raises(ConnectionError, match="closed the connection"):
        ends[0].receive()


def test_who_takes_nothing_does_not_block_the_sender_for_ever(ends):
    ends[0].set_timeout(0.05)
    with pytest.raises(TimeoutError):
        ends[0].send(bytes(32 << 20))


def test_close_ends_a_receive_in_another_thread(ends):
    errors = []

    def receive():
        try:
            ends[0].receive()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    ends[0].close()
    thread.join()
    assert len(errors) == 1
