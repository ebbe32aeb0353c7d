"""A Hugging Face hub on loopback, from which huggingface_hub itself downloads into a cache."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_of(repositories: dict[str, Path]) -> Iterator[str]:
    """Yields the address of a hub with these folders: "models/org/name" or "datasets/org/name", all at COMMIT."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            status, content, headers = self.find()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def find(self) -> tuple[int, bytes, dict[str, str]]:
            path = self.path.partition("?")[0].strip("/")
            for name, folder in repositories.items():
                files = {
                    str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()
                }
                if path.startswith(f"api/{name}/revision/"):
                    siblings = [{"rfilename": each} for each in files]
                    repository = {"id": name.partition("/")[2], "sha": COMMIT, "siblings": siblings}
                    return 200, json.dumps(repository).encode(), {"Content-Type": "application/json"}
                if path.startswith(f"api/{name}/tree/"):
                    tree = [
                        {"type": "file", "path": each, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for each, content in files.items()
                    ]
                    return 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}
                start = f"{name.removeprefix('models/')}/resolve/{COMMIT}/"
                if path.startswith(start) and (content := files.get(path.removeprefix(start))) is not None:
                    digest = hashlib.sha1(content).hexdigest()
                    return 200, content, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}
            return 404, b"", {"X-Error-Code": "EntryNotFound"}

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
