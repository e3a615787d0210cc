"""A store that speaks S3: moto's server on loopback, with a bucket that a client of the tests fills."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session
from moto.server import ThreadedMotoServer

BUCKET = "models"
PREFIX = "loras/pirate"
_KEYS = {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": "a-secret"}


@contextmanager
def s3_store() -> Iterator[str]:
    """Run a store; yields its URL."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def use_store(url: str, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Set the environment in which clients find the store; the cache is in this folder."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    settings: Mapping[str, str] = {
        **_KEYS,
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        "AWS_CONFIG_FILE": str(folder / "none"),
        "LORAPLEX_CACHE": str(folder / "cache"),
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in settings.items():
        patch.setenv(name, value)


class Bucket:
    """A bucket, filled by a client of the test's own."""

    def __init__(self, url: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in _KEYS.items():
                patch.setenv(name, value)
            session = Session()
            self.client: Any = session.create_client("s3", endpoint_url=url, region_name="us-east-1")
            self.client.create_bucket(Bucket=BUCKET)

    def put(self, files: dict[str, bytes] | Path, prefix: str = PREFIX) -> None:
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir()}
        for name, data in files.items():
            self.client.put_object(Bucket=BUCKET, Key=f"{prefix}/{name}", Body=data)

    def empty(self) -> None:
        self.client.delete_bucket_policy(Bucket=BUCKET)
        for each in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
            self.client.delete_object(Bucket=BUCKET, Key=each["Key"])
