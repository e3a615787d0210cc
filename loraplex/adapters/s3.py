"""Adapters in S3 and stores that speak its protocol: parsing their URLs and fetching their two files.

Credentials, region and endpoint are those of every AWS client: environment (AWS_ENDPOINT_URL_S3), profile,
role. Files are kept in `cache_dir()/s3`, in a folder for each revision. A revision is a hash of the ETags of
both objects, so it stands for their content, and a folder with its name is complete: it is renamed to it at
last.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from loraplex.adapters.checkpoint_files import PICKLE_FILE
from loraplex.adapters.peft_config import MAX_CONFIG_BYTES
from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.errors import AdapterError, AdapterFetchError, AdapterFormatError
from loraplex.core.paths import cache_dir
from loraplex.core.url_secrets import without_secrets
from loraplex.core.whole_file import write_whole

logger = logging.getLogger(__name__)

SCHEME: Final = "s3://"
_PREFIX: Final = "s3:"
_MAX_QUOTED_CHARS: Final = 200
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
# Wildcards would read like a pattern of --allow-adapter-repo, and # begins the revision.
_NOT_IN_PREFIX: Final = frozenset("#?*[]\\<>\"'`|^{} ")
_MAX_PREFIX_BYTES: Final = 900
_REVISION: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_CHUNK_BYTES: Final = 64 << 10
_CONNECT_S: Final = 10
_READ_S: Final = 30
_NUM_ATTEMPTS: Final = 3
_RETRIES: Final = 3
_PART: Final = ".part-"
_LATEST: Final = "latest"
_STALE_S: Final = 86_400.0
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOGIN: Final = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this machine a role"


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Folder:
    """The objects below `s3://bucket/prefix/`; as they are now, or of one revision if that is given."""

    bucket: str
    prefix: str
    revision: str | None = None

    @property
    def name(self) -> str:
        return self.prefix.rpartition("/")[2] or self.bucket

    @property
    def place(self) -> str:
        """The URL without a revision."""
        return f"{SCHEME}{self.bucket}/{self.prefix}" if self.prefix else f"{SCHEME}{self.bucket}"

    def at(self, revision: str) -> S3Folder:
        return replace(self, revision=revision)

    def key(self, file: str) -> str:
        return f"{self.prefix}/{file}" if self.prefix else file

    def __str__(self) -> str:
        return self.place if self.revision is None else f"{self.place}#{self.revision}"


def parse_s3(text: str) -> S3Folder | None:
    """Parse `s3://bucket/prefix`, or with `#revision` as `str` writes it; None if it is neither."""
    if not text.startswith(SCHEME):
        return None
    place, hash_sign, revision = text.removeprefix(SCHEME).partition("#")
    bucket, _, prefix = place.partition("/")
    prefix = prefix.removesuffix("/")
    is_named = _BUCKET.fullmatch(bucket) is not None and ".." not in bucket
    if not is_named or not _is_prefix(prefix) or (hash_sign and not _REVISION.fullmatch(revision)):
        return None
    return S3Folder(bucket=bucket, prefix=prefix, revision=revision or None)


def why_no_s3(text: str) -> str | None:
    """Return why a text that `parse_s3` does not read is no URL of S3, and what one looks like; None if it is
    not meant to be one."""
    if text[: len(_PREFIX)].lower() != _PREFIX:
        return None
    shown = without_secrets(text)[:_MAX_QUOTED_CHARS]
    return f"{shown!r} is no URL of S3: {_mistake(text)}; write one like s3://my-bucket/adapters/sql"


def fetch_s3(folder: S3Folder) -> Path:
    """Return the local folder with an adapter's two files, complete and of one revision, which is its name.

    Raises AdapterFetchError if they could not be fetched, AdapterFormatError if there is no adapter.
    """
    kept = kept_in(folder)
    if folder.revision is not None and (kept / folder.revision).is_dir():
        return kept / folder.revision
    try:
        with _explained(folder):
            return _fetch(folder, kept)
    except _UnreachableError as error:
        latest = None if folder.revision is not None else _latest(kept)
        if latest is None:
            raise AdapterFetchError(str(error)) from error
        logger.warning("%s; using what was fetched from there before (%s)", error, latest.name)
        return latest


def kept_in(folder: S3Folder) -> Path:
    """Return where revisions are kept. The store's names are no part of the path, but for the bucket's.
    Stores of other endpoints may have a bucket of the same name."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    prefix_hash = hashlib.sha256(f"{endpoint}\n{folder.prefix}".encode()).hexdigest()[:16]
    return cache_dir() / "s3" / folder.bucket / prefix_hash


class _UnreachableError(AdapterFetchError):
    """The store did not answer."""


class _ChangedError(Exception):
    """An object was replaced while it was being fetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Object:
    etag: str
    num_bytes: int


def _mistake(text: str) -> str:
    """Return what is wrong with a text that begins with s3:, but that `parse_s3` does not read."""
    if not text.startswith(SCHEME):
        return "it begins with s3:// in small letters, with two slashes"
    place, hash_sign, revision = text.removeprefix(SCHEME).partition("#")
    bucket, _, prefix = place.partition("/")
    parts = prefix.removesuffix("/").split("/")
    if not bucket:
        return "it names no bucket"
    if "@" in bucket or (":" in bucket and "@" in place):
        return f"it has a login, and logins are not part of it ({_LOGIN})"
    if _BUCKET.fullmatch(bucket) is None or ".." in bucket:
        return "a bucket's name has 3 to 63 small letters, digits, dots and hyphens"
    if hash_sign and _REVISION.fullmatch(revision) is None:
        return "what follows # is no revision, which has 32 hexadecimal digits"
    if "?" in prefix:
        return "it has parameters behind ?, as signed URLs have, which are not supported"
    if any(part in (".", "..") for part in parts):
        return "its path has the part . or .., which means nothing in a bucket"
    if len(parts) > 1 and "" in parts:
        return "its path has two slashes one after the other"
    if wrong := next((char for char in prefix if char in _NOT_IN_PREFIX or not char.isprintable()), None):
        return f"its path has {wrong!a} in it, which is not supported"
    return f"its path has more than {_MAX_PREFIX_BYTES} bytes"


def _is_prefix(prefix: str) -> bool:
    parts = prefix.split("/") if prefix else []
    is_clean = prefix.isprintable() and not _NOT_IN_PREFIX & set(prefix)
    return (
        is_clean
        and not any(part in ("", ".", "..") for part in parts)
        and len(prefix.encode()) <= _MAX_PREFIX_BYTES
    )


def _fetch(folder: S3Folder, kept: Path) -> Path:
    """Fetch both objects as they are now. Raises errors of the client, of the disk, and AdapterError."""
    client = _client()
    for _ in range(_NUM_ATTEMPTS):
        objects = _look_up(client, folder)
        revision = _revision_of(objects)
        if folder.revision not in (None, revision):
            raise AdapterFetchError(
                f"{folder.place} has changed since revision {folder.revision} was fetched, which the "
                "cache has lost; put the old files back, or load what is there now"
            )
        found = kept / revision
        try:
            if not found.is_dir():
                _download(client, folder, objects, found)
        except _ChangedError:
            continue
        write_whole(kept / _LATEST, revision)
        return found
    raise AdapterFetchError(f"{folder} changes while it is being fetched; load it when it is complete")


def _look_up(client: Any, folder: S3Folder) -> dict[str, _Object]:
    """Return both objects. Raises AdapterFormatError if one is missing."""
    from botocore.exceptions import ClientError

    found: dict[str, _Object] = {}
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            head = client.head_object(Bucket=folder.bucket, Key=folder.key(name))
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                raise _missing(client, folder, name) from error
            raise
        if not head.get("ETag") or head.get("ContentLength") is None:
            raise AdapterFetchError(
                f"the store of {folder.place} does not answer as S3 does; check AWS_ENDPOINT_URL_S3"
            )
        found[name] = _Object(etag=head["ETag"], num_bytes=head["ContentLength"])
    config_bytes = found[CONFIG_FILE].num_bytes
    if config_bytes > MAX_CONFIG_BYTES:
        raise AdapterFormatError(
            f"{folder.key(CONFIG_FILE)} in {folder.bucket} is {config_bytes:,} bytes long; a config has "
            f"at most {MAX_CONFIG_BYTES:,}"
        )
    return found


def _revision_of(objects: dict[str, _Object]) -> str:
    etags = "\n".join(objects[name].etag for name in (CONFIG_FILE, WEIGHTS_FILE))
    return hashlib.sha256(etags.encode()).hexdigest()[:32]


def _download(client: Any, folder: S3Folder, objects: dict[str, _Object], found: Path) -> None:
    """Fetch both objects into a folder that gets its name when it is complete. Raises _ChangedError."""
    found.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(found.parent)
    num_bytes = sum(each.num_bytes for each in objects.values())
    if shutil.disk_usage(found.parent).free < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(found.parent))
    part = Path(tempfile.mkdtemp(prefix=_PART, dir=found.parent))
    try:
        for name, each in objects.items():
            _download_one(client, folder, folder.key(name), each, part / name)
        if _look_up(client, folder) != objects:  # each is whole, but they may not belong together
            raise _ChangedError
        try:
            part.rename(found)
        except OSError:
            if not found.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _download_one(client: Any, folder: S3Folder, key: str, wanted: _Object, path: Path) -> None:
    """Fetch one object, and go on where a connection broke off, as long as the object is the same."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError, IncompleteReadError

    num_broken = 0
    with path.open("wb") as file:
        while (begin := file.tell()) < wanted.num_bytes:
            try:
                answer = client.get_object(
                    Bucket=folder.bucket, Key=key, IfMatch=wanted.etag, Range=f"bytes={begin}-"
                )
                if answer.get("ETag") != wanted.etag:  # a store that does not know If-Match
                    raise _ChangedError
                if not answer.get("ContentRange", "").startswith(f"bytes {begin}-"):
                    file.seek(0)  # a store that does not know Range sends all of it again
                    file.truncate()
                _copy(answer["Body"], file, wanted.num_bytes)
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] in (404, 412, 416):
                    raise _ChangedError from error
                raise
            except (ConnectionError, HTTPClientError, IncompleteReadError):
                num_broken += 1
                if num_broken == _NUM_ATTEMPTS:
                    raise
        file.flush()
        os.fsync(file.fileno())


def _copy(body: Any, file: Any, num_bytes: int) -> None:
    with body:
        while chunk := body.read(_CHUNK_BYTES):
            if file.tell() + len(chunk) > num_bytes:  # it would never end
                raise _ChangedError
            file.write(chunk)


def _missing(client: Any, folder: S3Folder, name: str) -> AdapterError:
    """Return why a folder has no adapter in it."""
    below = f"{folder.prefix}/" if folder.prefix else ""
    listed = client.list_objects_v2(Bucket=folder.bucket, Prefix=below, MaxKeys=1000)  # or: no such bucket
    keys = {each["Key"].removeprefix(below) for each in listed.get("Contents", ())}
    nested = sorted(key.rpartition("/")[0] for key in keys if key.endswith(f"/{CONFIG_FILE}"))
    if not keys:
        return AdapterFormatError(f"nothing is at {folder.place}; check the spelling")
    if CONFIG_FILE not in keys and nested:
        return AdapterFormatError(
            f"{folder.place} has no {CONFIG_FILE}; its adapters are below it ({', '.join(nested[:3])}): name "
            "one of them"
        )
    if WEIGHTS_FILE not in keys and PICKLE_FILE in keys:
        return AdapterFormatError(
            f"{folder.place} has its weights in {PICKLE_FILE} alone, and pickles are never opened because "
            "they can run code; load it with PEFT where you trust it, and save it with save_pretrained(..., "
            "safe_serialization=True)"
        )
    return AdapterFormatError(f"{folder.place} has no {name}; upload what PEFT's save_pretrained has written")


def _latest(kept: Path) -> Path | None:
    try:
        latest = kept / (kept / _LATEST).read_text()
    except OSError:
        return None
    return latest if _REVISION.fullmatch(latest.name) and latest.is_dir() else None


def _remove_stale(kept: Path) -> None:
    """Remove what killed processes have left."""
    for part in kept.glob(f"{_PART}*"):
        try:
            is_stale = time.time() - part.stat().st_mtime > _STALE_S
        except OSError:
            continue
        if is_stale:
            shutil.rmtree(part, ignore_errors=True)


def _client() -> Any:
    try:
        from botocore.config import Config
        from botocore.session import Session
    except ImportError:
        raise AdapterFetchError(
            "s3:// needs botocore, which is not installed; pip install 'loraplex[s3]'"
        ) from None
    config = Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        retries={"mode": "standard", "total_max_attempts": _RETRIES},
    )
    session = Session()  # of its own: not safe to share between threads, and credentials may change
    session.register_component("data_loader", _service_descriptions())
    return session.create_client("s3", config=config)


@cache
def _service_descriptions() -> Any:
    """Return the reader of the client's descriptions of S3, which take most of the time to make one."""
    from botocore.loaders import create_loader

    return create_loader()


@contextmanager
def _explained(folder: S3Folder) -> Iterator[None]:
    """Turn errors of the client and of the disk into AdapterFetchErrors, with the fix in them."""
    try:
        yield
    except AdapterError:
        raise
    except Exception as error:  # of the client, some of them ValueErrors or OSErrors, or of the disk
        raise _explain(folder, error) from error


def _explain(folder: S3Folder, error: Exception) -> AdapterFetchError:
    from botocore import exceptions

    where = f"{folder.place} could not be fetched"
    match error:
        case exceptions.ClientError():
            return AdapterFetchError(_explain_refusal(folder, error))
        case exceptions.HTTPClientError() | exceptions.ConnectionError() | exceptions.IncompleteReadError():
            # The error's text has the endpoint's URL, in which there may be a password: to the log only.
            logger.info("%s: %s", where, error)
            return _UnreachableError(
                f"{where}: its store does not answer ({type(error).__name__}); check the network, and "
                "AWS_ENDPOINT_URL_S3 for a store that is not Amazon's"
            )
        case exceptions.NoCredentialsError() | exceptions.PartialCredentialsError():
            return AdapterFetchError(f"{where}: there are no credentials; {_LOGIN}")
        case exceptions.BotoCoreError() | ValueError():
            logger.info("%s: %s", where, error)
            return AdapterFetchError(
                f"{where} with this machine's AWS settings ({type(error).__name__}, see the log); check "
                "AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL_S3"
            )
        case OSError():
            return AdapterFetchError(_explain_disk(folder, error))
    raise error


def _explain_refusal(folder: S3Folder, error: Any) -> str:
    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
    code = error.response.get("Error", {}).get("Code", "")
    if code == "NoSuchBucket" or status == 404:
        return f"there is no bucket {folder.bucket}; check the spelling, and the region or endpoint"
    if status in (401, 403):
        return (
            f"the store refuses to show {folder.place} ({code or status}): either nothing is there, or these "
            f"credentials may not read it (s3:GetObject; s3:ListBucket tells both apart); {_LOGIN}"
        )
    return (
        f"the store failed to deliver {folder.place} ({code or 'no code'}, status {status}); try again "
        "later, or give a local folder"
    )


def _explain_disk(folder: S3Folder, error: OSError) -> str:
    kept = cache_dir() / "s3"
    if error.errno in _NO_ROOM:
        return f"there is no room for {folder.place} in {kept}; free some space, or set LORAPLEX_CACHE"
    fix = "make that writable, or set LORAPLEX_CACHE"
    return f"{folder.place} cannot be kept in {kept} ({error.strerror}); {fix}"
