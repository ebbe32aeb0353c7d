"""An S3-compatible server on loopback in a process of its own, and a proxy before it that fails as networks do."""

import contextlib
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from types import TracebackType

from torchtitan_clone.checkpoint.remote import Pace
from torchtitan_clone.network import LOOPBACK

SECRET = "a-secret-that-no-message-holds"


def _answer(status: str, *, code: str, message: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


ANSWERS = {
    "busy": b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "refuse": _answer("403 Forbidden", code="InvalidAccessKeyId", message="The key does not exist."),
    "idle": _answer("400 Bad Request", code="RequestTimeout", message="Your socket connection was idle."),
    "conflict": _answer("409 Conflict", code="ConditionalRequestConflict", message="Try again."),
}
"""What the proxy answers in place of the server, by its mode."""


class Proxy:
    """Forwards connections to a port. `mode` changes at any time: pass, stall, cut, gone, or one of ANSWERS."""

    def __init__(self, port: int) -> None:
        self.mode = "pass"
        self.received = 0
        """Bytes from the server that were forwarded."""
        self.pace = Pace(None)
        """Limits how fast these are forwarded, over all connections."""
        self._pacing = threading.Lock()
        self._target = port
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, socket.create_connection((LOOPBACK, self._target)) as server:
                while self._forward(client, server):
                    pass
        except OSError:
            return

    def _forward(self, client: socket.socket, server: socket.socket) -> bool:
        """Forwards what is there; returns if the connection lasts."""
        ready, _, _ = select.select([client, server], [], [], 0.1)
        while self.mode == "stall":
            time.sleep(0.02)
        if self.mode in ("cut", "gone"):
            return False
        for source in ready:
            if not (chunk := source.recv(1 << 16)):
                return False
            if source is client and self.mode in ANSWERS:
                client.sendall(ANSWERS[self.mode])
                return False
            if source is server:
                with self._pacing:
                    self.pace.wait(len(chunk))
            (server if source is client else client).sendall(chunk)
            self.received += len(chunk) if source is server else 0
        return True


class ObjectServer:
    """A server with a proxy before it, as a context; `env` is the environment of those who use it.

    `address` is that of the server itself.
    """

    def __init__(self) -> None:
        with socket.create_server((LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=null, stderr=null)
        self.address = f"http://{LOOPBACK}:{port}"
        self.proxy = Proxy(port)
        self.env = {
            "AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{self.proxy.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> "ObjectServer":
        deadline = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < deadline
            assert self._process.poll() is None, "the server has ended"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.proxy.close()
        self._process.kill()
        self._process.wait()

    def make_bucket(self) -> str:
        """Returns the URL of a prefix in a new bucket."""
        bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        self._request(f"/{bucket}", method="PUT")
        return f"s3://{bucket}/runs/first"

    def unfinished_uploads(self, url: str) -> int:
        """Returns the multipart uploads that were neither completed nor aborted."""
        return self._request(f"/{url.split('/')[2]}?uploads", method="GET").count(b"<Upload>")

    def _answers(self) -> bool:
        try:
            self._request("/", method="GET")
        except OSError:
            return False
        return True

    def _request(self, path: str, *, method: str) -> bytes:
        request = urllib.request.Request(f"{self.address}{path}", method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()


@contextlib.contextmanager
def served_process() -> Iterator[ObjectServer]:
    """Starts a server that this process uses too, until the context ends."""
    with ObjectServer() as server:
        os.environ.update(server.env)
        try:
            yield server
        finally:
            for name in server.env:
                del os.environ[name]


def assert_refused(code: int, output: str, *, text: str) -> None:
    """Checks that a program has ended with one error like `text`, which holds no credentials."""
    assert code == 2
    assert re.search(text, output), output
    assert "Traceback" not in output
    assert "password" not in output
    assert SECRET not in output
