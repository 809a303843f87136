"""Hubs on this machine: HTTP servers that answer as huggingface.co does, so that the real client
does and raises what it would.

`hub` refuses, `Uploads` takes what is pushed, or breaks in the middle of it, and `Revisions` has a
dataset that changes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

ANSWERS = {  # the repository -> (status, X-Error-Code, X-Error-Message)
    "org/gated": (
        403,
        "GatedRepo",
        "Access to model org/gated is restricted and you are not in the authorized list.",
    ),
    "org/gated-anonymous": (
        401,
        "GatedRepo",
        "Access to model is restricted. You must be authenticated to access it.",
    ),
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
    """Environment variables of a process that asks this hub, with an empty cache in `folder` and
    without a token."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    names = [name for name in os.environ if not name.startswith(("HF_", "HUGGING"))]
    own = {"HF_HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    own["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
    try:
        yield {**{name: os.environ[name] for name in names}, **own}
    finally:
        server.shutdown()
        server.server_close()


class Uploads(ThreadingHTTPServer):
    """A hub of one repository, by the protocol of Git LFS. Large files are stored one by one, and
    then all are committed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), UploadHandler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()
        # the number of the large file that isn't taken, nor those after it
        self.breaks_at: float = float("inf")
        self.stored: dict[str, bytes] = {}  # large files by their hash
        self.put: list[str] = []  # their hashes as they came
        self.repository: dict[str, bytes] = {}  # what is committed, by path
        self.asked_for: list[str] = []  # repositories to be made, in JSON
        threading.Thread(target=self.serve_forever, daemon=True).start()


class UploadHandler(BaseHTTPRequestHandler):
    server: Uploads

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            status, said = self.do(self.path.partition("?")[0], body)
        content = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = answer

    def do(self, path: str, body: bytes) -> tuple[int, dict]:
        hub = self.server
        if path == "/api/repos/create":
            hub.asked_for.append(body.decode())
            return (200 if len(hub.asked_for) == 1 else 409), {"url": f"{hub.address}/org/name"}
        if path == "/api/validate-yaml":
            return 200, {}
        if path == "/api/models/org/name/preupload/main":
            files = []
            for name in (one["path"] for one in json.loads(body)["files"]):
                mode = "lfs" if name.endswith((".safetensors", ".png")) else "regular"
                files.append({"path": name, "uploadMode": mode, "shouldIgnore": False})
            return 200, {"files": files}
        if path == "/org/name.git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for one in objects:
                if one["oid"] not in hub.stored:
                    one["actions"] = {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}
            return 200, {"transfer": "basic", "objects": objects}
        if stored := re.fullmatch(r"/lfs/(\w+)", path):
            hub.put.append(stored[1])
            if len(hub.put) >= hub.breaks_at:
                return 403, {"error": "the connection broke"}
            hub.stored[stored[1]] = body
            return 200, {}
        if path == "/api/models/org/name/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.repository[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.repository[value["path"]] = hub.stored[value["oid"]]
            return 200, {"commitUrl": f"{hub.address}/org/name/commit/1", "commitOid": "1" * 40}
        return 404, {}

    def log_message(self, *words: object) -> None:
        pass


class Revisions(ThreadingHTTPServer):
    """A hub of one dataset, org/name, with a new commit whenever its train.jsonl was read. The
    texts of the n-th commit are of the word `commitN`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RevisionHandler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.commits: dict[str, dict[str, bytes]] = {}
        self.commit()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def commit(self) -> None:
        word, files = f"commit{len(self.commits)}", {}
        for name, count in (("train", 40), ("validation", 9)):
            texts = [f"{word} document number {number} of {name}" for number in range(count)]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            files[f"{name}.jsonl"] = lines.encode()
        self.commits[hashlib.sha1(word.encode()).hexdigest()] = files


class RevisionHandler(BaseHTTPRequestHandler):
    server: Revisions

    def answer(self) -> None:
        status, headers, content = self.do(unquote(self.path.partition("?")[0]))
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = answer

    def do(self, path: str) -> tuple[int, dict[str, str], bytes]:
        missing = 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        asked = re.fullmatch(
            r"(/api)?/datasets/org/name(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path
        )
        if asked is None:
            return missing
        is_api, what, commit, name = asked.groups()
        if commit in (None, "main"):
            commit = [*self.server.commits][-1]
        files = self.server.commits[commit]
        if is_api and what != "tree":
            siblings = [{"rfilename": file} for file in files]
            said = {"id": "org/name", "sha": commit, "siblings": siblings}
            return 200, {}, json.dumps(said).encode()
        if is_api and name is None:
            tree = []
            for file, content in files.items():
                oid = hashlib.sha1(content).hexdigest()
                tree.append({"type": "file", "path": file, "size": len(content), "oid": oid})
            return 200, {}, json.dumps(tree).encode()
        if name not in files:
            return missing
        if self.command == "GET" and name == "train.jsonl":
            self.server.commit()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{commit}"'}, files[name]

    def log_message(self, *words: object) -> None:
        pass
