"""Serves the report of runs that are under way to the browsers of this machine."""

import contextlib
import html
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from torchtitan_clone.config import ConfigError
from torchtitan_clone.network import LOOPBACK
from torchtitan_clone.observe.metrics import METRICS_FILE
from torchtitan_clone.tools.report import build_report
from torchtitan_clone.tools.report_data import run_folders

REFRESH_SECONDS = 15
HOSTS = (LOOPBACK, "localhost")


class ReportServer(ThreadingHTTPServer):
    """Builds the page when it is asked for and metrics.jsonl has changed since."""

    def __init__(self, folders: Sequence[Path], *, port: int) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self._folders = folders
        self._lock = threading.Lock()
        self._state: list[tuple[int, int]] | None = None
        self._page = b""

    def page(self) -> bytes:
        """Returns the present page; where there is none, what is wrong."""
        with self._lock:
            try:
                stats = [(place / METRICS_FILE).stat() for folder in self._folders for place in run_folders(folder)]
                state = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
                if state != self._state:
                    self._page, self._state = build_report(self._folders).encode(), state
            except (ConfigError, OSError) as error:
                return f"<!DOCTYPE html><p>{html.escape(str(error))}</p>".encode(errors="replace")
            return self._page


class _Handler(BaseHTTPRequestHandler):
    timeout = 60  # in seconds, of a connection that sends or accepts nothing

    def do_GET(self) -> None:
        assert isinstance(self.server, ReportServer)
        # A page of another site may have a name that leads here.
        is_for_us = self.headers.get("Host", "").rpartition(":")[0] in HOSTS and self.path == "/"
        page = self.server.page() if is_for_us else b""
        self.send_response(200 if is_for_us else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header("Refresh", str(REFRESH_SECONDS))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


def serve(folders: Sequence[Path], *, port: int) -> int:
    """Serves until Ctrl-C; returns the exit code. ConfigError if the folders cannot be reported now."""
    build_report(folders)
    try:
        server = ReportServer(folders, port=port)
    except OSError as error:
        raise ConfigError(f"--port={port}: cannot listen: {error.strerror}; choose another port") from None
    with server:
        sys.stdout.write(f"http://{LOOPBACK}:{server.server_port}/  (Ctrl-C ends)\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
