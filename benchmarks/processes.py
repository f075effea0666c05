"""The server's processes as the operating system sees them: which there are, and their memory."""

import os
import resource
from collections.abc import Sequence

import psutil

ROLES = {"ProxyActor": "proxy", "HAProxyManager": "proxy", ":Ingress": "ingress", ":Replica": "replica"}
"""What a process does, by what stands in the title that Ray gives it."""


def role(command: Sequence[str]) -> str | None:
    """What a process with this command line does; None where it is none of the server's own."""
    if not command:
        return None
    if os.path.basename(command[0]) == "haproxy":
        return "haproxy"
    return next((name for mark, name in ROLES.items() if command[0].startswith("ray::") and mark in command[0]), None)


class ServerMemory:
    """Resident memory of the server that this process has started."""

    def __init__(self) -> None:
        self._processes: list[tuple[str, psutil.Process]] = []
        for process in psutil.Process().children(recursive=True):
            try:
                name = role(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if name is not None:
                self._processes.append((name, process))

    def __call__(self) -> dict[str, int]:
        """Bytes by role: those of all its processes."""
        sizes: dict[str, int] = {}
        for name, process in self._processes:
            sizes[name] = sizes.get(name, 0) + process.memory_info().rss
        return sizes


def allow_files(count: int) -> None:
    """Raises this process's (and its children's) limit of open files. Raises `OSError` where the system refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            raise OSError(f"{count} open files are needed and this system allows {hard}; raise `ulimit -Hn`")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
