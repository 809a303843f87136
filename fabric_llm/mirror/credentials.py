"""Keys for S3. obstore doesn't look for them in the files of a profile. Where it finds them, in the
environment and at the endpoints of a container and of an instance, it doesn't tell which they are:
so they are looked for here as well, to sign the requests of leftovers.py.

The order is that of https://docs.aws.amazon.com/sdkref/latest/guide/standardized-credentials.html,
without single sign-on and roles that are assumed.
"""

import configparser
import json
import os
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Optional

CONTAINER, INSTANCE = "http://169.254.170.2", "http://169.254.169.254"
SECONDS = 2.0  # an endpoint of the machine itself answers at once
NAMES = {  # in a profile -> obstore's
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
# Where one of these is set, obstore finds credentials by itself.
OTHERS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


def endpoint() -> str:
    """URL of the server that is asked instead of Amazon's, "" without one."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    return next(filter(None, map(os.environ.get, names)), "")


def of_profile() -> dict[str, str]:
    """Keys and region of AWS_PROFILE, or of the profile `default`, by obstore's names; {} where the
    environment has them."""
    profile = os.environ.get("AWS_PROFILE", "default")
    found = {}
    if not any(name in os.environ for name in OTHERS):
        section = _section("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile)
        found = {NAMES[name]: value for name, value in section.items() if name in NAMES}
    if not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
        # In this file the section of a profile is called `profile NAME`, but for the default.
        named = profile if profile == "default" else f"profile {profile}"
        region = _section("AWS_CONFIG_FILE", "config", named).get("region")
        if region:
            found["region"] = region
    return found


def _section(variable: str, name: str, section: str) -> dict[str, str]:
    path = Path(os.environ.get(variable) or Path.home() / ".aws" / name)
    parser = configparser.RawConfigParser()
    # A file that can't be read holds no keys: what is missing is said by the first request.
    with suppress(configparser.Error, OSError, UnicodeDecodeError):
        parser.read(path)
    return dict(parser[section]) if parser.has_section(section) else {}


def find() -> Optional[tuple[str, str, str]]:
    """(key, secret, token or ""), None where there are none."""
    environment, profile = os.environ, of_profile()
    if "AWS_ACCESS_KEY_ID" in environment:
        return (
            environment["AWS_ACCESS_KEY_ID"],
            environment.get("AWS_SECRET_ACCESS_KEY", ""),
            environment.get("AWS_SESSION_TOKEN", ""),
        )
    if "access_key_id" in profile:
        return (
            profile["access_key_id"],
            profile.get("secret_access_key", ""),
            profile.get("session_token", ""),
        )
    # Whatever an endpoint answers or doesn't, there are no keys of it.
    with suppress(OSError, ValueError, KeyError):
        answer = json.loads(_of_container() or _of_instance())
        return answer["AccessKeyId"], answer["SecretAccessKey"], answer["Token"]
    return None


def _of_container() -> str:
    """What a container's endpoint answers (ECS, EKS), "" outside of one."""
    environment = os.environ
    url = environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")
    if path := environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        url = CONTAINER + path
    if not url:
        return ""
    token = environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
    if file := environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        token = Path(file).read_text().strip()
    return _ask(url, {"Authorization": token} if token else {})


def _of_instance() -> str:
    """What an EC2 instance's endpoint answers."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        raise ValueError  # for `find`: there are no keys
    # An instance may answer only to who has fetched a token before (IMDSv2).
    token = _ask(
        f"{INSTANCE}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, "PUT"
    )
    place = f"{INSTANCE}/latest/meta-data/iam/security-credentials/"
    header = {"X-aws-ec2-metadata-token": token}
    return _ask(place + _ask(place, header).split()[0], header)


def _ask(url: str, headers: dict[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=headers, method=method)
    # Without a proxy: these endpoints are of the machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=SECONDS) as answer:
        return answer.read().decode()
