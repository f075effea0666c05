"""From process start to a warm engine, in a process of its own: with an empty compilation cache, then with that one."""

import argparse
import json
import subprocess
import sys
import tempfile
import time

from benchmarks.figures import emit, progress
from benchmarks.workload import add_options, app_config, build


def measure(arguments: list[str]) -> dict[str, dict[str, float]]:
    """Seconds of the phases of a cold and of a warm start; `arguments` are options of `workload.add_options`."""
    with tempfile.TemporaryDirectory() as cache:
        return {name: _start(name, [*arguments, "--cache-dir", cache]) for name in ("cold", "warm")}


def _start(name: str, arguments: list[str]) -> dict[str, float]:
    progress(f"startup: {name} ...")
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    phases = json.loads(done.stdout.splitlines()[-1])
    total = time.perf_counter() - begin
    del phases["benchmark"]
    return phases | {"total_s": total}


def main() -> None:
    """The command: a parent that measures, and (with --cache-dir) the child that starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--cache-dir", help="start one engine with this compilation cache, and print its phases")
    options = parser.parse_args()
    if options.cache_dir is None:
        emit("startup", {"model": options.model, **measure(sys.argv[1:])})
        return
    begin = time.perf_counter()
    engine = build(app_config(options, options.cache_dir))
    built = time.perf_counter()
    programs = engine.warm_up()
    warm = time.perf_counter()
    emit("start", {"build_s": built - begin, "warm_up_s": warm - built, "num_programs": len(programs)})


if __name__ == "__main__":
    main()
