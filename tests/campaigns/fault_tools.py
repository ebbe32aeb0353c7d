"""Means of faults on this machine: processes, a TCP proxy, a clock that jumps, a small disk, a network of its own."""

import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

MAX_PIDS = 1 << 22
BLOCK_LIMIT = "/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device"
CGROUPS = "/sys/fs/cgroup/unified"
CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long *seconds_of_pid;
static int (*real_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("CLOCK_JUMPS");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    if (file < 0) return;
    void *table = mmap(NULL, 8L << 22, PROT_READ, MAP_SHARED, file, 0);
    if (table != MAP_FAILED) seconds_of_pid = table;
    close(file);
}
static long jump(void) { return seconds_of_pid ? seconds_of_pid[getpid()] : 0; }
int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock) real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_clock(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""
"""Adds seconds to the real-time clock of each process, from a shared table by process id."""


def descendants(pids: list[int]) -> dict[int, str]:
    """Returns the command lines of all processes that these have started, directly or not."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: command_of(pid) for pid in found - set(pids)}


def command_of(pid: int) -> str:
    """Returns the command line of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def send(number: int, *pids: int) -> None:
    """Sends a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Proxy:
    """Forwards TCP connections to a port of this machine; `delay` in seconds, `blocked` forwards nothing."""

    def __init__(self, port: int) -> None:
        self.delay = 0.0
        self.blocked = False
        self._port = port
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._server.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        while self.blocked:
            time.sleep(0.05)
        try:
            far = socket.create_connection(("127.0.0.1", self._port))
        except OSError:
            near.close()
            return
        self._open |= {near, far}
        for pair in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self.delay)
                while self.blocked:
                    time.sleep(0.05)
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            self._open.discard(each)

    def reset(self) -> None:
        """Resets all connections: both ends get an error."""
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self.blocked = False
        self._server.close()
        self.reset()


class Clock:
    """A library for LD_PRELOAD, through which the real-time clock of single processes jumps; needs gcc."""

    def __init__(self, folder: Path) -> None:
        source = folder / "clock.c"
        source.write_text(CLOCK_SOURCE)
        library, table = folder / "clock.so", folder / "jumps"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        with table.open("wb") as file:
            file.truncate(8 * MAX_PIDS)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_JUMPS": str(table)}

    @staticmethod
    def is_available() -> bool:
        """Returns whether the library can be built."""
        return shutil.which("gcc") is not None


def jump(pid: int, *, seconds: int) -> None:
    """Sets the clock of a process ahead, or back; it must run with the environment of `Clock`."""
    with open(os.environ["CLOCK_JUMPS"], "r+b") as file, mmap.mmap(file.fileno(), 0) as table:
        place = slice(8 * pid, 8 * pid + 8)
        (now,) = struct.unpack("q", table[place])
        table[place] = struct.pack("q", now + seconds)


class Disk:
    """A small ext4 file system in a file, mounted at `folder` in a mount namespace of our own; needs root."""

    def __init__(self, folder: Path, *, mebibytes: int = 24) -> None:
        self.folder = folder
        self._image = folder.with_name(f"{folder.name}.img")
        folder.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(mebibytes << 20)
        command("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        self._device = ""
        self._mount()

    def _mount(self) -> None:
        command("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.folder))
        self._device = Path(command("findmnt", "-no", "SOURCE", str(self.folder)).strip()).name

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Leaves no free block inside."""
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        try:
            yield
        finally:
            ballast.unlink()

    @contextlib.contextmanager
    def slow(self, *, bytes_per_second: int) -> Iterator[None]:
        """Limits writes to the device, inside."""
        self._limit(bytes_per_second)
        try:
            yield
        finally:
            self._limit(0)

    def _limit(self, bytes_per_second: int) -> None:
        number = Path(f"/sys/block/{self._device}/dev").read_text().strip()
        Path(BLOCK_LIMIT).write_text(f"{number} {bytes_per_second}\n")

    def break_down(self) -> None:
        """Reports an error of the file system to the kernel, which makes it read-only (errors=remount-ro)."""
        Path(f"/sys/fs/ext4/{self._device}/trigger_fs_error").write_text("1")

    def repair(self) -> None:
        """Checks and mounts the file system again; nothing may have a file open."""
        command("umount", str(self.folder))
        subprocess.run(["e2fsck", "-fy", str(self._image)], check=False, capture_output=True)
        self._mount()

    def close(self) -> None:
        """Unmounts it."""
        subprocess.run(["umount", "-l", str(self.folder)], check=False, capture_output=True)


class Network:
    """The loopback interface of a network namespace of our own; needs root, iptables and tc."""

    def __init__(self, name: str, *, groups: int) -> None:
        command("ip", "link", "set", "lo", "up")
        self._cgroups = [Path(f"{CGROUPS}/{name}-{group}") for group in range(groups)]
        for cgroup in self._cgroups:
            cgroup.mkdir(exist_ok=True)

    def place(self, pids: list[int], *, group: int) -> None:
        """Makes the sockets that these processes open from now on those of a group."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (self._cgroups[group] / "cgroup.procs").write_text(str(pid))

    @contextlib.contextmanager
    def drop(self, *, group: int | None = None, probability: float = 1.0) -> Iterator[None]:
        """Drops packets, those that a group sends or those of all, inside."""
        rule = ["OUTPUT"]
        if group is not None:
            rule += ["-m", "cgroup", "--path", self._cgroups[group].name]
        if probability < 1:
            rule += ["-m", "statistic", "--mode", "random", "--probability", str(probability)]
        rule += ["-j", "DROP"]
        command("iptables", "-A", *rule)
        try:
            yield
        finally:
            command("iptables", "-D", *rule)

    @contextlib.contextmanager
    def slow(self, *, kilobits: int) -> Iterator[None]:
        """Limits the rate, which delays packets and drops those that wait too long, inside."""
        command(*f"tc qdisc add dev lo root tbf rate {kilobits}kbit burst 70kb latency 800ms".split())
        try:
            yield
        finally:
            command("tc", "qdisc", "del", "dev", "lo", "root")

    def reset(self, pids: list[int], *, store: int) -> int:
        """Resets the connections of a group's processes to others, but for the one to its store, at this port."""
        lines = [line.split() for line in command("ss", "-tnpH", "state", "established").splitlines()]
        own = {words[2]: words[3] for words in lines if any(f"pid={pid}," in words[-1] for pid in pids)}
        inside = {plain_address(near) for near in own}
        outward = {
            near: far for near, far in own.items() if plain_address(far) not in inside and not far.endswith(f":{store}")
        }
        for near, far in outward.items():
            command("ss", "-K", "src", near, "dst", far)
        return len(outward)

    def close(self) -> None:
        """Removes the cgroups."""
        for cgroup in self._cgroups:
            with contextlib.suppress(OSError):
                cgroup.rmdir()


def plain_address(text: str) -> str:
    """Returns an IPv4 address and port without the form that IPv6 sockets give it."""
    return text.replace("[::ffff:", "").replace("]:", ":")


def command(*words: str) -> str:
    """Runs a system command; returns its output, RuntimeError if it fails."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def limit_file_size(pid: int, *, size: int) -> None:
    """Sets the largest file that a process may write, in bytes; -1 removes the limit. It may have ended."""
    ctypes.CDLL(None).prlimit(pid, 1, struct.pack("qq", size, -1), None)  # 1: RLIMIT_FSIZE


def wait_until_gone(pids: list[int], *, timeout: float) -> list[str]:
    """Returns the command lines of those processes that have not ended after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (left := [text for pid in pids if (text := command_of(pid))]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def stop_for(pids: list[int], *, seconds: float) -> None:
    """Stops processes (SIGSTOP) and lets them continue."""
    send(signal.SIGSTOP, *pids)
    try:
        time.sleep(seconds)
    finally:
        send(signal.SIGCONT, *pids)
