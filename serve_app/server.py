"""A Ray cluster with this application on it, from start to drained end."""

import logging
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, TracebackType

import ray
from ray import serve

from serve_app.app import build_app
from serve_app.config import ServeFile
from serve_app.console import say
from serve_app.factories import EngineFactory, TextFactory, build_engine_lazily, build_text_lazily

logger = logging.getLogger(__name__)


class Server:
    """Context manager: Ray is up inside it, and down (or left as it was found) after it."""

    def __init__(
        self,
        file: ServeFile,
        address: str | None = None,
        *,
        engine_factory: EngineFactory = build_engine_lazily,
        text_factory: TextFactory = build_text_lazily,
        temp_dir: str | None = None,
    ) -> None:
        """`address`: a running cluster to join; None starts one on this machine, with its files in `temp_dir`."""
        self._file = file
        self._address = address
        self._engine_factory = engine_factory
        self._text_factory = text_factory
        self._temp_dir = temp_dir

    def __enter__(self) -> "Server":
        # Ray's and Serve's own progress is in their log files; here only what is wrong.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        runtime_env = self._file.application.runtime_env or None
        if self._address is not None:
            ray.init(address=self._address, namespace="serve", runtime_env=runtime_env, logging_level=logging.WARNING)
        else:
            ray.init(
                address="local",
                namespace="serve",
                runtime_env=runtime_env,
                logging_level=logging.WARNING,
                include_dashboard=False,
                _temp_dir=self._temp_dir,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._address is None:
            serve.shutdown()
        else:
            serve.delete(self._file.application.name)
        ray.shutdown()

    def start(self) -> None:
        """Returns once every replica is warm. Raises `RuntimeError` with the reason where one cannot start."""
        application = self._file.application
        serve.start(
            proxy_location=self._file.proxy_location, http_options=self._file.http_options.model_dump(exclude_none=True)
        )
        app = build_app(application.args, self._engine_factory, self._text_factory)
        serve.run(app, name=application.name, route_prefix=application.route_prefix)

    def drain(self) -> None:
        """Refuses new requests (503) and returns when those that run have ended, or their time is up.

        What else goes wrong is logged. Raises what a signal's handler does.
        """
        timeout_s = self._file.application.args.serving.graceful_shutdown_s
        # Not on this thread: Ray would take the exception of a signal's handler for a process's answer.
        executor = ThreadPoolExecutor(max_workers=1)
        try:
            outcomes = executor.submit(self._drain, timeout_s).result()
        finally:
            executor.shutdown(wait=False)
        if any(isinstance(outcome, TimeoutError) for outcome in outcomes):
            say(f"requests still run after {timeout_s:g} s; they are cancelled")
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, TimeoutError):
                logger.warning("an ingress process did not drain to its end: %s: %s", type(outcome).__name__, outcome)

    def _drain(self, timeout_s: float) -> list[object]:
        """What came of it at each ingress process: None, or an exception."""
        try:
            ingress = serve.get_app_handle(self._file.application.name)
            return ingress.broadcast("drain").results(timeout_s=timeout_s, return_exceptions=True)
        except Exception as error:
            return [error]


def serve_until_stopped(server: Server) -> int:
    """Starts, waits for SIGTERM or SIGINT, drains. The exit status: 0, or 1 where the start failed."""
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
