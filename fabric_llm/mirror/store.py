"""What is done with objects. Files are read and sent in parts, so that memory is bounded whatever
their size."""

import errno
import hashlib
import random
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import BAD_INPUT, SAVE_FAILED, Fault
from fabric_llm.base.files import LARGEST_MANIFEST_BYTES, MANIFEST
from fabric_llm.mirror.address import open_store, require_obstore

PART_BYTES = 8 * 2**20
MOST_PARTS = 9_000  # S3 takes 10,000
AT_ONCE = 4  # parts in flight
LONGEST_PAUSE_SECONDS = 60.0
FOLDER = ".leases"  # of all runs, see lease.py
# It sorts before the name of any lease, so that an owner removes what a kill has left of it.
PROBE = f"{FOLDER}/a-probe"
# Words in obstore's messages, and in those of servers that it quotes, by what they mean, see
# `as_fault`.
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist", "InvalidBucketName")
BAD_KEY = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed", "InvalidToken"),
    *("ExpiredToken", "TokenRefreshRequired", "401 Unauthorized", "UnauthenticatedError"),
)
WRONG_REGION = (
    *("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraint"),
    *("incorrectly configured region", "AuthorizationQueryParametersError"),
)
NO_KEY = (
    *("169.254.169.254", "169.254.170.2", "metadata.google.internal", "NoCredentials"),
    *("Missing AccessKeyId", "Missing SecretAccessKey"),
)
# Of a folder. Others may go: EIO, ESTALE, ETIMEDOUT, ENOSPC, EDQUOT, EBUSY.
LASTING = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
)
NO_RIGHT = ("AccessDenied", "AllAccessDisabled", "403 Forbidden", "Permission denied")


class Damaged(Exception):
    """A local file isn't what its manifest says, or can't be read. Its text says which."""


def errors() -> tuple[type[Exception], ...]:
    """What obstore raises. A missing object is a FileNotFoundError, which is an OSError."""
    from obstore.exceptions import BaseError

    return BaseError, OSError


def pauses() -> Iterator[float]:
    """Seconds between tries: from 1 to 60, drawn, so that many runs don't come back at once."""
    pause = 1.0
    while True:
        yield random.uniform(0.5, 1) * pause
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class Store:
    """The objects below an address. Methods raise `errors()`, and count their requests.

    Names are relative to the address.
    """

    def __init__(self, address: str, in_run: bool = False) -> None:
        """in_run: the run has used it before, so that no error is a mistake. Raises Fault (2)
        without obstore. No request is made."""
        require_obstore(address)
        self.address, self.in_run, self.requests = address, in_run, 0
        self.opened: Any = None

    @property
    def raw(self) -> Any:
        """obstore's, opened by the first request, which has the patience for what that raises."""
        opened = self.opened  # another thread may call `reopen` in between
        if opened is None:
            opened = self.opened = open_store(self.address)
        return opened

    def reopen(self) -> None:
        """After an error: the files with credentials may have changed."""
        self.opened = None

    def _count(self, requests: int = 1) -> Any:
        import obstore

        self.requests += requests
        return obstore

    def size(self, name: str) -> Optional[int]:
        """Bytes of an object, None where there is none."""
        return next((one["size"] for one in self.described(name)), None)

    def described(self, name: str) -> list[dict[str, Any]]:
        """[path, size in bytes and e_tag of an object], [] where there is none."""
        with suppress(FileNotFoundError):
            return [self._count().head(self.raw, name)]
        return []

    def content(self, name: str, most_bytes: int = LARGEST_MANIFEST_BYTES) -> Optional[bytes]:
        """Of a small object. None where there is none, b"" for one with more than `most_bytes`."""
        with suppress(FileNotFoundError):
            answer = self._count().get(self.raw, name)
            return bytes(answer.bytes()) if answer.meta["size"] <= most_bytes else b""
        return None

    def put(self, name: str, content: bytes) -> None:
        """Make or replace a small object."""
        # A failed put is sent again by obstore itself, which does no harm here.
        self._count().put(self.raw, name, content, mode="overwrite", use_multipart=False)

    def create(self, name: str, content: bytes) -> bool:
        """Make a small object, unless there is one already. Returns whether `content` is there.

        The answer to a put may be lost and the put sent again, which then finds its own object.
        """
        from obstore.exceptions import AlreadyExistsError

        try:
            self._count().put(self.raw, name, content, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return self.content(name) == content
        return True

    def send(self, name: str, path: Path, check: Callable[[], None], size: int) -> str:
        """Make or replace an object from the first `size` bytes of a file. Returns the sha256 of
        what was sent.

        check: called before each part; what it raises ends the upload, whose parts are then
        removed. Raises Damaged if the file is shorter or can't be read.
        """
        hashed = hashlib.sha256()
        part = max(PART_BYTES, -(-size // MOST_PARTS))

        def parts() -> Iterator[bytes]:
            left = size
            # Else a missing file would pass for a missing object.
            try:
                with path.open("rb") as file:
                    while left > 0:
                        check()
                        content = file.read(min(part, left))
                        if not content:
                            raise Damaged(f"{str(path)!r} is shorter than {size} bytes")
                        left -= len(content)
                        hashed.update(content)
                        yield content
                        failpoint("mirror.part")
            except OSError as error:
                raise Damaged(f"{str(path)!r} can't be read: {error.strerror}") from error

        # One request, instead of a multipart upload, of which a kill leaves parts (leftovers.py).
        if size <= part:
            self.put(name, b"".join(parts()))
        else:
            # Begin and completion are requests of their own.
            self._count(-(-size // part) + 2).put(
                self.raw,
                name,
                parts(),
                mode="overwrite",
                use_multipart=True,
                chunk_size=part,
                max_concurrency=AT_ONCE,
            )
        return hashed.hexdigest()

    def pieces(self, name: str, size: int, begin: int = 0) -> Iterator[bytes]:
        """The content of an object of `size` bytes from `begin` on, in order, a few pieces
        ahead."""
        pool = ThreadPoolExecutor(AT_ONCE)
        waiting: deque = deque()
        get_range = self._count(0).get_range
        try:
            for start in range(begin, size, PART_BYTES):
                self.requests += 1
                length = min(PART_BYTES, size - start)
                waiting.append(pool.submit(get_range, self.raw, name, start=start, length=length))
                # The memory holds no more pieces than this, however slow the caller is.
                if len(waiting) == AT_ONCE:
                    yield bytes(waiting.popleft().result())
            while waiting:
                yield bytes(waiting.popleft().result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def read(
        self,
        name: str,
        size: int,
        again: Callable[[Callable[[], bool]], bool],
        take: Callable[[bytes], Any],
    ) -> str:
        """Hand the content of an object of `size` bytes to `take`, in order. Returns the sha256 of
        what there was: of less than `size` bytes if the object goes meanwhile.

        again: calls an action until it succeeds, which goes on where the one before has failed.
        """
        hashed, done = hashlib.sha256(), 0

        def go_on() -> bool:
            nonlocal done
            began = done
            try:
                for piece in self.pieces(name, size, began):
                    take(piece)
                    hashed.update(piece)
                    done += len(piece)
            except FileNotFoundError:
                return True
            except errors():
                # Whatever came counts as success, so that patience begins anew.
                if done == began:
                    raise
                return False
            return True

        while not again(go_on):
            pass
        return hashed.hexdigest()

    def folders(self, name: str) -> list[str]:
        """Names of the folders in a folder, sorted, without what is in them."""
        listed = self._count().list_with_delimiter(self.raw, name)["common_prefixes"]
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in listed)

    def files(self, name: str) -> list[str]:
        """Names of the objects in a folder, sorted, without those in folders there."""
        listed = self._count().list_with_delimiter(self.raw, name)["objects"]
        return sorted(found["path"].rpartition("/")[2] for found in listed)

    def objects(self, name: str) -> list[dict[str, Any]]:
        """All objects below a folder, sorted: their path, size in bytes and e_tag."""
        found: list[dict[str, Any]] = []
        for listed in self._count().list(self.raw, name):
            found += listed
        return sorted(found, key=lambda one: one["path"])

    def below(self, name: str) -> list[str]:
        """Names of all objects below a folder, sorted."""
        return [found["path"] for found in self.objects(name)]

    def remove(self, names: list[str]) -> None:
        """Remove objects, whether they are there or not."""
        for name in names:
            with suppress(FileNotFoundError):
                self._count().delete(self.raw, name)

    def remove_folder(self, name: str) -> None:
        """Remove a checkpoint or another folder: first its manifest, so that it is never there in
        part."""
        self.remove([f"{name}/{MANIFEST}"])
        failpoint("mirror.removing")
        self.remove(self.below(name))


def reason(error: BaseException) -> str:
    """What went wrong, in a few words. obstore's own text is long, and has addresses in it, which
    may hold keys."""
    text = str(error)
    status = re.search(r"status code: (\d{3}[A-Za-z ]*)", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    local = re.search(r"([\w -]+) \(os error \d+\)", text)
    if any(word in text for word in NO_KEY):
        return "no credentials were found"
    if status:
        said = f" ({code[1]})" if code else ""
        return f"the server answered {status[1].strip()}{said}"
    # Of a folder. Such a number in an error of S3 is that of a connection, see below.
    if local and not text.startswith("Generic S3"):
        return local[1].strip()
    if "kind: Timeout" in text or "operation timed out" in text:
        return "the server didn't answer in time"
    if "kind: Connect" in text or "error sending request" in text:
        return "the server can't be reached"
    return getattr(error, "strerror", None) or type(error).__name__


def _lasts(error: BaseException) -> bool:
    """Whether an error of a folder doesn't go by itself."""
    number = getattr(error, "errno", None)
    if number is not None:
        return number in LASTING
    found = re.search(r"\(os error (\d+)\)", str(error))
    # Below the folder, another process may have removed what was there.
    return found is not None and int(found[1]) in {*LASTING} - {errno.ENOENT}


def as_fault(error: BaseException, address: str, in_run: bool = False) -> Fault:
    """The Fault for what obstore raised, in a sentence about `address`: 2 where the user can mend
    it, 74 where it may go by itself. Once the run has used the address, `in_run`, always 74."""
    text = str(error)
    why, code = f"{reason(error)}: try again later", SAVE_FAILED

    def says(words: tuple[str, ...]) -> bool:
        return any(word in text for word in words)

    if says(NO_BUCKET):
        why, code = "there is no such bucket: make it first", BAD_INPUT
    elif says(NO_KEY):
        why = "no credentials were found: give them in the environment, as the cloud's tools do"
        code = BAD_INPUT
    elif says(BAD_KEY):
        why, code = f"the credentials aren't accepted ({reason(error)})", BAD_INPUT
    elif says(WRONG_REGION):
        expected = re.search(r"expecting '([\w-]+)'|<Region>([\w-]+)</Region>", text)
        name = "the bucket's"
        if expected:
            name = expected[1] or expected[2]
        why, code = f"it lies in another region: set AWS_REGION to {name}", BAD_INPUT
    elif says(NO_RIGHT):
        why = (
            f"no right to do that there ({reason(error)}): a mirror lists, reads, writes and "
            "removes objects, and data is listed and read"
        )
        code = BAD_INPUT
    elif _lasts(error):
        why, code = f"{reason(error)}: name another folder", BAD_INPUT
    return Fault(f"{address}: {why}.", SAVE_FAILED if in_run else code)


def probe(store: Store) -> None:
    """Make, read, list and remove an object, before a model is loaded.

    Raises what the store does, and Fault (2) for one that replaces objects which it was asked to
    leave alone.
    """
    replaced, there = _probed(store)
    # Once more: an owner that begins or ends takes this process's object for one that a kill left.
    if replaced or there != b"first":
        replaced, there = _probed(store)
    store.below(FOLDER)
    if replaced:
        raise Fault(
            f"The mirror {store.address}: its server takes a second object of one name, although "
            "it was asked not to (If-None-Match: *), so that two runs would overwrite each other: "
            "take another server."
        )
    if there != b"first":
        raise Fault(f"The mirror {store.address} doesn't give back what was written.")


def _probed(store: Store) -> tuple[bool, Optional[bytes]]:
    """(whether a second object of one name took the place of the first, what there is of this name
    then: it should be b"first")."""
    # A name of its own: processes that start together must not take each other's for theirs.
    name = f"{PROBE}-{secrets.token_hex(8)}"
    store.create(name, b"first")
    try:
        return store.create(name, b"second"), store.content(name)
    finally:
        store.remove([name])
