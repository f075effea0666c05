"""`python -m serve_app configs/app.yaml`: checks, starts, and on SIGTERM finishes what runs and refuses what is new.

`serve run` reads the same file, but it starts before it checks, and a SIGTERM ends it with the requests under way.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from engine.errors import EngineError
from serve_app.config import ServeFile, load_file
from serve_app.console import say

if TYPE_CHECKING:  # at run time it is imported late, after the environment is set
    from serve_app.server import Server


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 after a shutdown on request, 1 where the start failed, 2 where the file is wrong."""
    options = _parse(argv)
    try:
        file = load_file(options.config)
        _check_model(file)
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.check:
        say(f"{options.config} is in order")
        return 0
    # Serve's own log goes to its files; the terminal shows this project's lines, and what goes wrong.
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    from serve_app.server import Server

    return _serve(Server(file, options.address))


def _serve(server: "Server") -> int:
    stop = threading.Event()
    with server:
        signals = _Signals(stop)
        try:
            server.start()
        except InterruptedError:
            say("stopped while starting")
            return 0
        except RuntimeError as error:
            sys.stderr.write(f"the start failed: {error}\n")
            return 1
        signals.serving = True
        stop.wait()
        server.drain()
    return 0


class _Signals:
    """SIGTERM and SIGINT: while starting, and when given twice, they end the process; else they ask it to drain."""

    def __init__(self, stop: threading.Event) -> None:
        self.serving = False
        self._stop = stop
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.serving or self._stop.is_set():
            raise InterruptedError(f"signal {signal.Signals(number).name}")
        say(f"{signal.Signals(number).name}: finishing the requests that run, refusing new ones")
        self._stop.set()


def _check_model(file: ServeFile) -> None:
    """Raises where the model's or the tokenizer's files are not there."""
    from engine.weights.source import resolve_source

    model = file.application.args.model
    for source in filter(None, (model.source, model.tokenizer)):
        resolve_source(source)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m serve_app", description=__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/app.yaml"), help="the config file")
    parser.add_argument("--address", help="a running Ray cluster ('auto' finds it); default: start one on this machine")
    parser.add_argument("--check", action="store_true", help="check the file and that the model is there, then stop")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
