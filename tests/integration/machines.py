"""Machines for a test, on this one: namespaces with their own network, processes, home directory and SSH server.

A machine is all that differs between two computers in one room and two processes here: an address, a host name, process
numbers, a home, and Ray's directory. Files and the processor are shared. All of it ends with the process that holds it.
"""

import ctypes
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PROGRAMS = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "sshd", "rsync", "bash")
# Where sshd lies, which is not on everybody's path.
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_NAMESPACES = ("--net", "--pid", "--fork", "--mount", "--uts", "--kill-child=KILL")
_LIMIT_S = 30
_CLONE_NEWNET = 0x40000000

_MACHINE = """\
set -euo pipefail
mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$DIRECTORY/passwd" /etc/passwd
mount --bind "$DIRECTORY/hosts" /etc/hosts
mkdir -p /tmp/ray /run/sshd
mount -t tmpfs tmpfs /tmp/ray
hostname "$NAME"
ip link set lo up
[ -z "$BRIDGE_ADDRESS" ] || {
    ip link add lan type bridge
    ip addr add "$BRIDGE_ADDRESS/24" dev lan
    ip link set lan up
    # What is not in the room cannot be reached, and whoever asks is told so at once.
    echo 1 > /proc/sys/net/ipv4/ip_forward
}
touch "$DIRECTORY/up"
"$SSHD" -D -e -f "$DIRECTORY/sshd_config" &
# Not `exec`: whatever loses its parent here becomes this shell's, which takes note of its end.
while true; do wait || true; sleep 1; done
"""

_SSHD_CONFIG = """\
HostKey {directory}/host_key
AuthorizedKeysFile {authorized_keys}
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
"""


def what_is_missing() -> str | None:
    """Why there can be no such machines here, or None."""
    if os.geteuid() != 0:
        return "test machines need root, for network namespaces"
    missing = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
    if missing:
        return f"test machines need {', '.join(missing)}"
    trial = "ip link add lan type bridge && ip link add trial0 type veth peer name trial1 && mount --make-rprivate /"
    done = subprocess.run(["unshare", *_NAMESPACES, "bash", "-c", trial], capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else None


class Machine:
    """One machine; its directory is removed by the room."""

    def __init__(self, name: str, address: str, directory: Path, authorized_keys: Path, is_switch: bool) -> None:
        self.name, self.address = name, address
        self.home = directory / "home"
        self.home.mkdir(parents=True)
        self._directory = directory
        self._write_files(authorized_keys)
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", *_NAMESPACES, "bash", "-c", _MACHINE],
                env={
                    "PATH": _PATH,
                    "NAME": name,
                    "DIRECTORY": str(directory),
                    "BRIDGE_ADDRESS": address if is_switch else "",
                    "SSHD": str(shutil.which("sshd", path=_PATH)),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._until_up()

    def _write_files(self, authorized_keys: Path) -> None:
        me = pwd.getpwuid(os.geteuid())
        lines = [
            ":".join([me.pw_name, "x", str(me.pw_uid), str(me.pw_gid), "", str(self.home), "/bin/bash"])
            if line.startswith(f"{me.pw_name}:")
            else line
            for line in Path("/etc/passwd").read_text().splitlines()
        ]
        (self._directory / "passwd").write_text("\n".join(lines) + "\n")
        (self._directory / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name}\n")
        key = self._directory / "host_key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        config = _SSHD_CONFIG.format(directory=self._directory, authorized_keys=authorized_keys)
        (self._directory / "sshd_config").write_text(config)

    def _until_up(self) -> None:
        give_up_at = time.monotonic() + _LIMIT_S
        while not (self._directory / "up").exists():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < give_up_at, self.log
            time.sleep(0.02)

    @property
    def log(self) -> str:
        """What its shell and its SSH server have said."""
        return (self._directory / "log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Of its first process, as this machine numbers it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def run(
        self,
        *command: str | Path,
        timeout_s: float = 300,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Runs a command on it, in its home; what it writes. Raises `AssertionError` with that where it fails."""
        entered = ["nsenter", "-t", str(self.pid), "--net", "--pid", "--mount", "--uts", *map(str, command)]
        done = subprocess.run(
            entered,
            cwd=self.home,
            env={"PATH": _PATH, "HOME": str(self.home), "TERM": "dumb", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not (check and done.returncode), f"{command} on {self.name}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def command_lines(self) -> str:
        """Of all that runs on it."""
        return self.run("bash", "-c", r"cat /proc/[0-9]*/cmdline 2> /dev/null | tr '\0' ' '", check=False)

    def kill(self) -> None:
        """Ends everything on it at once."""
        self.process.kill()
        self.process.wait()


class Room:
    """Machines on one network, the first of which is the operator's own (and the switch)."""

    def __init__(self, num_hosts: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="room"))
        self._machines: list[Machine] = []
        self._threads: ThreadPoolExecutor | None = None
        try:
            self._key = self.directory / "key"
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._key], check=True)
            self.operator = self._add("operator", 1)
            self.hosts = [self._add(f"host{i}", i + 1) for i in range(1, num_hosts + 1)]
            for host in self.hosts:
                self._plug_in(host)
            self._threads = ThreadPoolExecutor(4, initializer=_enter_network, initargs=(self.operator.pid,))
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, number: int) -> Machine:
        public = self._key.with_name("key.pub")
        machine = Machine(name, f"10.77.0.{number}", self.directory / name, public, is_switch=number == 1)
        self._machines.append(machine)
        return machine

    def _plug_in(self, host: Machine) -> None:
        peer = ["peer", "name", "eth0", "netns", str(host.pid)]
        self._on_network(self.operator, "link", "add", host.name, "type", "veth", *peer)
        self._on_network(self.operator, "link", "set", host.name, "master", "lan", "up")
        self._on_network(host, "addr", "add", f"{host.address}/24", "dev", "eth0")
        self._on_network(host, "link", "set", "eth0", "up")
        # It leads nowhere, but Ray finds a machine's own address by a route to the world.
        self._on_network(host, "route", "add", "default", "via", self.operator.address)

    def _on_network(self, machine: Machine, *command: str) -> None:
        # Not inside its mounts and processes: process numbers are this machine's.
        subprocess.run(["nsenter", "-t", str(machine.pid), "--net", "ip", *command], check=True, env={"PATH": _PATH})

    @property
    def key(self) -> Path:
        """Opens every machine."""
        return self._key

    def cut_off(self, host: Machine) -> None:
        """Pulls its cable."""
        self._on_network(self.operator, "link", "set", host.name, "down")

    def from_operator(self, call: Callable[[], T], timeout_s: float) -> T:
        """The result of a call whose connections begin at the operator's machine."""
        assert self._threads is not None
        return self._threads.submit(call).result(timeout_s)

    def close(self) -> None:
        """Ends every machine, and removes their files."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        for machine in self._machines:
            machine.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


def _enter_network(pid: int) -> None:
    """Puts this thread, and no other, on the network of that process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to the network of process {pid}")
