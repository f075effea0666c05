"""`python -m serve_app configs/app.yaml`: checks, starts, and on SIGTERM finishes what runs and refuses what is new.

`serve run` reads the same file, but it starts before it checks, and a SIGTERM ends it with the requests under way.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.errors import EngineError
from serve_app.config import ServeFile, load_file
from serve_app.console import say
from serve_app.environment import prepare_environment


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 after a shutdown on request, 1 where the start failed, 2 where the file is wrong."""
    options = _parse(argv)
    try:
        file = load_file(options.config)
        _check_model(file)
        file.application.args.auth.resolved()
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.check:
        say(f"{options.config} is in order")
        return 0
    prepare_environment()
    from serve_app.server import Server, serve_until_stopped

    return serve_until_stopped(Server(file, options.address))


def _check_model(file: ServeFile) -> None:
    """Raises where the files of the model, the draft model or the tokenizer are not there."""
    from engine.weights.source import resolve_source

    model = file.application.args.model
    for source in filter(None, (model.source, model.draft_source, model.tokenizer)):
        resolve_source(source)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m serve_app", description=__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/app.yaml"), help="the config file")
    parser.add_argument("--address", help="a running Ray cluster ('auto' finds it); default: start one on this machine")
    parser.add_argument(
        "--check", action="store_true", help="check the file, and that the model and the keys are there, then stop"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
