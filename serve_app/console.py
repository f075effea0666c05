"""What an operator reads while a server starts: a few plain lines on stdout."""

import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import EngineError

_SECONDS_BETWEEN_LINES = 2.0


def say(line: str) -> None:
    """One line on stdout, at once. In a Serve replica Ray carries it to the terminal of `serve run`."""
    # Serve puts its own log in the place of sys.stdout; the process's own stdout is what reaches the terminal.
    stdout = sys.__stdout__ or sys.stdout
    stdout.write(line + "\n")
    stdout.flush()


def configure_logging(level: str) -> None:
    """Sends this project's log to stderr."""
    logger = logging.getLogger("serve_app")
    logger.setLevel(level)
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.__stderr__ or sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        logger.addHandler(handler)


@contextmanager
def told_on_failure(what: str) -> Iterator[None]:
    """Says why `what` cannot start, and lets the error pass. Serve alone would keep the reason in its log files."""
    try:
        yield
    except EngineError as error:
        say(f"{what} cannot start: {error}")
        raise
    except Exception as error:
        say(f"{what} cannot start: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        raise


class StartUpLines:
    """Progress of long phases as lines, not more than one every two seconds."""

    def __init__(self) -> None:
        self._last_at = 0.0

    def weights(self, done_bytes: int, total_bytes: int, name: str) -> None:
        """Called after each tensor."""
        if self._due(done_bytes == total_bytes):
            share = 100 * done_bytes // max(total_bytes, 1)
            say(f"weights loading: {share} % of {total_bytes / 1e9:.2f} GB ({name})")

    def programs(self, done: int, total: int, name: str) -> None:
        """Called before each program, and after the last."""
        if done < total and self._due(done == 0):
            say(f"programs compiling: {done} of {total} done, now {name}")

    def _due(self, always: bool) -> bool:
        now = time.monotonic()
        if not always and now - self._last_at < _SECONDS_BETWEEN_LINES:
            return False
        self._last_at = now
        return True
