"""A hub that refuses: an HTTP server that answers as huggingface.co does, so that the real client raises its real errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS = {  # the repository -> (status, X-Error-Code, X-Error-Message)
    "org/gated": (403, "GatedRepo", "Access to model org/gated is restricted and you are not in the authorized list."),
    "org/gated-anonymous": (401, "GatedRepo", "Access to model is restricted. You must be authenticated to access it."),
    "org/nothing": (404, "RepoNotFound", "Repository not found"),
    "org/private": (401, "RepoNotFound", "Invalid username or password."),
    "org/token": (401, "", "Invalid credentials in Authorization header"),
    "org/empty": (404, "EntryNotFound", "Entry not found"),
}


class Handler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        name = next((name for name in ANSWERS if f"/{name}/" in f"{self.path}/"), "org/nothing")
        status, code, message = ANSWERS[name]
        self.send_response(status)
        for header, value in (("X-Error-Code", code), ("X-Error-Message", message)):
            if value:
                self.send_header(header, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = answer

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def hub(folder: Path) -> Iterator[dict[str, str]]:
    """Environment variables of a process that asks this hub, with an empty cache in `folder` and without a token."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    try:
        yield {
            **own,
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(folder),
            "NO_PROXY": "127.0.0.1",
        }
    finally:
        server.shutdown()
        server.server_close()
