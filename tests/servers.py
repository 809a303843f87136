"""Object storage on this machine: servers that pip installs, each in a process of its own, and a
proxy that answers as a server in trouble does.

Nothing of the product is used here: what is stored is read with boto3.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Optional

import pytest

BUCKET = "models"
SECONDS_TO_START = 60


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones: each is taken until all are found."""
    with ExitStack() as taken:
        found = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


def program(name: str) -> str:
    """A program of this environment. Skips the test without it."""
    path = shutil.which(name, path=str(Path(sys.executable).parent))
    return path or pytest.skip(f"{name} isn't installed")


class Server:
    """A server that can be killed and started again on its port."""

    def __init__(self, words: Callable[[int], list[str]], folder: Path, **environment: str) -> None:
        self.port, self.words, self.folder = free_port(), words, folder
        self.environment = {**os.environ, **environment}
        self.process: Optional[subprocess.Popen] = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.words(self.port), cwd=self.folder, env=self.environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(self.answers, SECONDS_TO_START)

    def answers(self) -> bool:
        assert self.process.poll() is None, f"{self.process.args} ended"
        try:
            urllib.request.urlopen(self.url, timeout=5).close()
        except urllib.error.HTTPError:
            return True  # refused, but by the server
        except OSError:
            return False
        return True

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def wait_for(ask: Callable[[], Any], seconds: float = 30) -> Any:
    end = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)
    return answer


@contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        server.start()
        yield server
    finally:
        server.kill()


def moto(folder: Path, **environment: str) -> Server:
    path = program("moto_server")
    return Server(lambda port: [path, "-H", "127.0.0.1", "-p", str(port)], folder, **environment)


def seaweed(folder: Path) -> Server:
    path = program("weed")
    ports = free_ports(7)
    (folder / "data").mkdir()
    return Server(
        lambda port: [
            path, "server", "-ip=127.0.0.1", f"-dir={folder / 'data'}", "-s3", f"-s3.port={port}",
            f"-master.port={ports[0]}", f"-master.port.grpc={ports[1]}",
            f"-volume.port={ports[2]}", f"-volume.port.grpc={ports[3]}",
            f"-filer.port={ports[4]}", f"-filer.port.grpc={ports[5]}", "-volume.max=300",
            f"-s3.port.grpc={ports[6]}", "-master.volumeSizeLimitMB=64",
            "-s3.port.iceberg=0", "-s3.port.lance=0",
        ],
        folder,
        # Whom it knows, it reads there.
        **keys(""),
    )  # fmt: skip


def rclone(folder: Path) -> Server:
    path = program("rclone")
    (folder / "data" / BUCKET).mkdir(parents=True)
    return Server(
        lambda port: [
            path, "serve", "s3", "--auth-key", "key,secret", "--addr", f"127.0.0.1:{port}",
            str(folder / "data"),
        ],
        folder,
    )  # fmt: skip


def keys(url: str) -> dict[str, str]:
    """Environment variables of whoever asks a server."""
    known = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    where = {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}
    return {**known, **where, "AWS_EC2_METADATA_DISABLED": "true"}


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on whoever asks a server asks this one."""
    for name, value in keys(url).items():
        monkeypatch.setenv(name, value)


class Bucket:
    """What is stored, seen with boto3."""

    def __init__(self, url: str, name: str = BUCKET) -> None:
        boto3 = pytest.importorskip("boto3")
        self.name = name
        self.client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret",
            region_name="us-east-1",
        )  # fmt: skip

    def make(self) -> Bucket:
        """Once the server takes it: seaweedfs answers before it has read its keys."""

        def made() -> bool:
            try:
                self.client.create_bucket(Bucket=self.name)
            except self.client.exceptions.ClientError as error:
                return error.response["Error"]["Code"].startswith("BucketAlready")
            return True

        wait_for(made)
        return self

    def names(self, prefix: str = "") -> set[str]:
        pages = self.client.get_paginator("list_objects_v2")
        return {
            found["Key"]
            for page in pages.paginate(Bucket=self.name, Prefix=prefix)
            for found in page.get("Contents", ())
        }

    def content(self, name: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=name)["Body"].read()

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=name, Body=content)

    def remove(self, name: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=name)

    def parts(self) -> list[str]:
        """Uploads that were begun and neither completed nor removed."""
        found = self.client.list_multipart_uploads(Bucket=self.name)
        return [upload["Key"] for upload in found.get("Uploads", ())]


class Proxy:
    """Hands requests on to a server. answer(method, path, count): (status, XML) instead, or None;
    slow_seconds: before each answer."""

    def __init__(self, url: str) -> None:
        self.answer: Callable[[str, str, int], Optional[tuple[int, str]]] = lambda *_: None
        self.requests: list[tuple[str, str]] = []
        self.authorization = ""  # of the last request
        self.slow_seconds = 0.0
        self.gate = threading.Event()
        self.gate.set()
        proxy, target = self, url.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                proxy.requests.append((self.command, self.path))
                proxy.authorization = self.headers.get("Authorization", "")
                proxy.gate.wait()
                time.sleep(proxy.slow_seconds)
                if found := proxy.answer(self.command, self.path, len(proxy.requests)):
                    self.respond(found[0], [("Content-Type", "text/xml")], found[1].encode())
                    return
                connection = http.client.HTTPConnection(target, timeout=60)
                # the host is signed
                connection.putrequest(self.command, self.path, True, True)
                for name, value in self.headers.items():
                    connection.putheader(name, value)
                connection.endheaders(body)
                answer = connection.getresponse()
                content = answer.read()
                headers = [
                    (name, value)
                    for name, value in answer.getheaders()
                    if name.lower() not in ("connection", "transfer-encoding", "date", "server")
                ]
                self.respond(answer.status, headers, content)
                connection.close()

            def respond(self, status: int, headers: list, content: bytes) -> None:
                self.send_response(status)
                for name, value in headers:
                    if name.lower() != "content-length" or self.command == "HEAD":
                        self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_one

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # of clients that were killed
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    proxy = Proxy(url)
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.fixture(scope="session")
def moto_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(moto(tmp_path_factory.mktemp("moto"))) as server:
        yield server.url


@pytest.fixture(scope="session")
def seaweed_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(seaweed(tmp_path_factory.mktemp("seaweed"))) as server:
        yield server.url


@pytest.fixture
def rclone_url(tmp_path: Path) -> Iterator[str]:
    with running(rclone(tmp_path)) as server:
        yield server.url
