"""Parts of multipart uploads that a kill has left: no object shows them, but they cost money.

obstore can't list them, so S3 is asked with requests that are signed here, as in
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html. Other
stores need a lifecycle rule.
"""

import hashlib
import hmac
import os
import re
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Iterator
from urllib.parse import quote, urlsplit

from fabric_llm.mirror import credentials
from fabric_llm.mirror.address import local_folder

SECONDS = 30.0
EMPTY = hashlib.sha256(b"").hexdigest()


def remove(address: str, folder: str) -> int:
    """Remove such parts below `folder` of `address`. Returns of how many uploads; 0 where nobody
    can tell.

    Raises OSError and ValueError if a request fails.
    """
    if local := local_folder(address):
        return _remove_files(local / folder)
    url = urlsplit(address)
    keys = credentials.find() if url.scheme == "s3" else None
    if keys is None:
        return 0
    prefix = f"{url.path.strip('/')}/{folder}/".lstrip("/")
    uploads = list(_uploads(url.netloc, prefix, keys))
    for key, upload in uploads:
        _request("DELETE", url.netloc, key, {"uploadId": upload}, keys)
    return len(uploads)


def _remove_files(folder: Path) -> int:
    """obstore writes FILE#1 beside FILE, and lists none of these."""
    names = [path for path in folder.rglob("*#*") if re.search(r"#\d+$", path.name)]
    for path in names:
        path.unlink(missing_ok=True)
    return len(names)


def _uploads(bucket: str, prefix: str, keys: tuple[str, str, str]) -> Iterator[tuple[str, str]]:
    """(key, id) of each upload below a prefix that was begun and not completed."""
    more: dict[str, str] = {}
    while True:
        answer = _request("GET", bucket, "", {"uploads": "", "prefix": prefix, **more}, keys)
        for upload in answer.iterfind("{*}Upload"):
            key = upload.findtext("{*}Key", "")
            # Whatever the server answers, nothing else is touched.
            if key.startswith(prefix):
                yield key, upload.findtext("{*}UploadId", "")
        if answer.findtext("{*}IsTruncated") != "true":
            return
        more = {
            "key-marker": answer.findtext("{*}NextKeyMarker", ""),
            "upload-id-marker": answer.findtext("{*}NextUploadIdMarker", ""),
        }


def _request(
    method: str, bucket: str, key: str, query: dict[str, str], keys: tuple[str, str, str]
) -> Any:
    """A request without a body. Returns the answer's XML; an empty element for none, or for an
    upload that is gone."""
    region = (
        os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or credentials.of_profile().get("region")
        or "us-east-1"
    )
    endpoint = credentials.endpoint() or f"https://s3.{region}.amazonaws.com"
    url = urlsplit(endpoint)
    path = quote(f"{url.path.rstrip('/')}/{bucket}/{key}", safe="/-_.~")
    # The signature is of the query in this order, so it is sent in this order.
    sent = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted(query.items()))
    time = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": url.netloc, "x-amz-content-sha256": EMPTY, "x-amz-date": time}
    if keys[2]:
        headers["x-amz-security-token"] = keys[2]
    headers["authorization"] = _signature(method, path, sent, headers, time, region, keys)
    request = urllib.request.Request(
        f"{url.scheme}://{url.netloc}{path}?{sent}", headers=headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            content = answer.read()
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        content = b""
    try:
        return ElementTree.fromstring(content or b"<none/>")
    except ElementTree.ParseError as error:
        raise ValueError("no XML") from error


def _signature(
    method: str,
    path: str,
    query: str,
    headers: dict[str, str],
    time: str,
    region: str,
    keys: tuple[str, str, str],
) -> str:
    """The header `authorization`."""
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    canonical = "\n".join((method, path, query, lines, names, EMPTY))
    scope = f"{time[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    # The key of the signature is made of the secret by date, region, service and version in turn.
    key = f"AWS4{keys[1]}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    to_sign = f"AWS4-HMAC-SHA256\n{time}\n{scope}\n{digest}"
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    return (
        f"AWS4-HMAC-SHA256 Credential={keys[0]}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
