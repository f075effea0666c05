"""Ray Serve's process-wide switches. They are read when Serve is imported, so they are set before that."""

import os

_SWITCHES = {
    # Serve's own log goes to its files; the terminal shows this project's lines, and what goes wrong.
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # One item for each stream and step passes between the processes. By gRPC it costs half the CPU time of Ray's
    # object store (1.5 ms instead of 3 ms a token, all processes together, on a busy 2-core machine).
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    # Ray's workers give way to every other process (15) unless told not to; an engine under load should not.
    "RAY_worker_niceness": "0",
}


def prepare_environment() -> None:
    """Sets the switches that the operator has not set. A cluster that this process starts inherits them."""
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)
