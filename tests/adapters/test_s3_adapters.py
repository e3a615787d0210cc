"""Adapters in S3, by the real client against moto's server on loopback."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from adapter_factory import SHAPE, write_adapter
from botocore.exceptions import ReadTimeoutError
from s3_store import BUCKET, PREFIX, Bucket, s3_store, use_store

from loraplex.adapters import least_rate, s3
from loraplex.adapters.peft_config import MAX_CONFIG_BYTES
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.remote import AllowedSources, local_path, locate_adapter, resolve_adapter
from loraplex.adapters.s3 import S3Folder, fetch_s3, parse_s3
from loraplex.adapters.spec import CONFIG_FILE, WEIGHTS_FILE
from loraplex.core.errors import AdapterError, AdapterFetchError, AdapterFormatError, PathNotAllowedError

PIRATE = S3Folder(bucket=BUCKET, prefix=PREFIX)


@pytest.fixture(scope="module")
def store_url() -> Iterator[str]:
    with s3_store() as url:
        yield url


@pytest.fixture(autouse=True)
def environment(store_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_store(store_url, monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def module_bucket(store_url: str) -> Bucket:
    return Bucket(store_url)


@pytest.fixture
def bucket(module_bucket: Bucket) -> Iterator[Bucket]:
    yield module_bucket
    module_bucket.empty()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter, with files beside it that nobody needs for serving."""
    folder = write_adapter(tmp_path / "mine")
    (folder / "README.md").write_text("# pirate")
    (folder / "optimizer.pt").write_bytes(b"large")
    return folder


def changed(adapter: Path) -> bytes:
    """A config that has the same length."""
    data = (adapter / CONFIG_FILE).read_bytes()
    assert b'"lora_alpha": 8' in data
    return data.replace(b'"lora_alpha": 8', b'"lora_alpha": 9')


def kept() -> list[str]:
    """Return the names of files in the cache, but for the notes of the latest revisions."""
    root = Path(os.environ["LORAPLEX_CACHE"]) / "s3"
    return sorted(path.name for path in root.rglob("*") if path.is_file() and path.name != "latest")


def test_only_the_two_files_are_fetched_into_a_folder_of_their_revision(
    bucket: Bucket, adapter: Path
) -> None:
    bucket.put(adapter)
    folder = fetch_s3(PIRATE)
    assert read_adapter(folder, SHAPE).version == read_adapter(adapter, SHAPE).version
    assert kept() == [CONFIG_FILE, WEIGHTS_FILE]
    assert resolve_adapter("s3://models/loras/pirate/") == folder
    assert PIRATE.at(folder.name) == parse_s3(f"s3://models/loras/pirate#{folder.name}")

    bucket.put({CONFIG_FILE: changed(adapter)})
    newer = fetch_s3(PIRATE)
    assert newer.name != folder.name
    assert read_adapter(newer, SHAPE).version != read_adapter(folder, SHAPE).version
    assert fetch_s3(PIRATE.at(folder.name)) == folder, "what was fetched stays as it was"


def test_a_revision_that_is_in_the_cache_needs_no_store(
    bucket: Bucket, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(adapter)
    folder = fetch_s3(PIRATE)
    bucket.put({CONFIG_FILE: changed(adapter)})
    with monkeypatch.context() as patch:
        patch.setattr(s3, "_client", lambda: pytest.fail("the store was asked"))
        assert fetch_s3(PIRATE.at(folder.name)) == folder
    shutil.rmtree(folder)
    with pytest.raises(AdapterFetchError, match="which the cache has lost"):
        fetch_s3(PIRATE.at(folder.name))


def test_what_was_fetched_last_is_used_while_the_store_is_away(
    bucket: Bucket, adapter: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.put(adapter)
    folder = fetch_s3(PIRATE)
    monkeypatch.setattr(s3, "_client", lambda client=s3._client: _unplugged(client()))
    assert fetch_s3(PIRATE) == folder
    assert "using what was fetched from there before" in caplog.text


def _unplugged(client: Any) -> Any:
    def refuse(**_: Any) -> None:
        raise ReadTimeoutError(endpoint_url="http://user:hidden@store")

    client.head_object = refuse
    return client


def test_an_object_that_is_replaced_meanwhile_is_noticed_by_its_etag(
    bucket: Bucket, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking it up and fetching it, and then between the two files."""
    bucket.put(adapter)
    weights = (adapter / WEIGHTS_FILE).read_bytes()
    look_up, download_one = s3._look_up, s3._download_one
    seen: list[str] = []

    def look_up_then_replace(client: Any, folder: S3Folder) -> Any:
        found = look_up(client, folder)
        if not seen:
            seen.append("after looking")
            bucket.put({WEIGHTS_FILE: weights + b"longer"})
        return found

    def download_then_replace(client: Any, folder: S3Folder, key: str, *rest: Any) -> None:
        download_one(client, folder, key, *rest)
        if key.endswith(WEIGHTS_FILE) and len(seen) == 1:
            seen.append("between the two")
            bucket.put({CONFIG_FILE: changed(adapter), WEIGHTS_FILE: weights})

    monkeypatch.setattr(s3, "_look_up", look_up_then_replace)
    monkeypatch.setattr(s3, "_download_one", download_then_replace)
    folder = fetch_s3(PIRATE)
    assert seen == ["after looking", "between the two"]
    assert (folder / CONFIG_FILE).read_bytes() == changed(adapter)
    assert (folder / WEIGHTS_FILE).read_bytes() == weights
    assert kept() == [CONFIG_FILE, WEIGHTS_FILE], "only the last attempt is left"


def test_an_adapter_that_never_stays_the_same_is_not_served(
    bucket: Bucket, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(adapter)
    look_up = s3._look_up
    config = (adapter / CONFIG_FILE).read_bytes()
    number = count(1)

    def look_up_then_replace(client: Any, folder: S3Folder) -> Any:
        found = look_up(client, folder)
        bucket.put({CONFIG_FILE: config + b" " * next(number)})
        return found

    monkeypatch.setattr(s3, "_look_up", look_up_then_replace)
    with pytest.raises(AdapterFetchError, match="changes while it is being fetched"):
        fetch_s3(PIRATE)
    assert kept() == []


def test_a_broken_connection_is_gone_on_with(
    bucket: Bucket, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(adapter)
    copy = s3._copy
    num_broken = 0

    def break_off(body: Any, file: Any, num_bytes: int) -> None:
        nonlocal num_broken
        if num_broken < 2 and num_bytes > 1000:
            num_broken += 1
            file.write(body.read(100))
            body.close()
            raise ReadTimeoutError(endpoint_url="http://store")
        copy(body, file, num_bytes)

    monkeypatch.setattr(s3, "_copy", break_off)
    folder = fetch_s3(PIRATE)
    assert num_broken == 2
    assert (folder / WEIGHTS_FILE).read_bytes() == (adapter / WEIGHTS_FILE).read_bytes()


def test_a_store_that_sends_all_again_after_a_break(tmp_path: Path) -> None:
    class Body(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if len(asked) == 1 and self.tell() > 0:
                raise ReadTimeoutError(endpoint_url="http://store")
            return super().read(3)

    class Store:
        def get_object(self, **options: str) -> dict[str, Any]:
            asked.append(options["Range"])
            return {"ETag": "e", "Body": Body(b"0123456789")}

    asked: list[str] = []
    wanted = s3._Object(etag="e", num_bytes=10)
    folder = S3Folder(bucket="bucket", prefix="folder")
    s3._download_one(Store(), folder, "folder/key", wanted, tmp_path / "file")
    assert (asked, (tmp_path / "file").read_bytes()) == (["bytes=0-", "bytes=3-"], b"0123456789")


def test_a_store_that_is_none() -> None:
    class Store:
        def head_object(self, **_: str) -> dict[str, Any]:
            return {"ContentLength": 3}

    with pytest.raises(AdapterFetchError, match="does not answer as S3 does; check AWS_ENDPOINT_URL_S3"):
        s3._look_up(Store(), S3Folder(bucket="bucket", prefix="folder"))


def nothing(bucket: Bucket, files: dict[str, bytes]) -> None:
    """The prefix has no objects."""


def nested(bucket: Bucket, files: dict[str, bytes]) -> None:
    bucket.put({f"step-100/{name}": data for name, data in files.items()})


def pickle_only(bucket: Bucket, files: dict[str, bytes]) -> None:
    bucket.put({CONFIG_FILE: files[CONFIG_FILE], "adapter_model.bin": b"pickle"})


def no_weights(bucket: Bucket, files: dict[str, bytes]) -> None:
    bucket.put({CONFIG_FILE: files[CONFIG_FILE]})


def huge_config(bucket: Bucket, files: dict[str, bytes]) -> None:
    bucket.put(files | {CONFIG_FILE: b" " * (MAX_CONFIG_BYTES + 1)})


def forbidden(bucket: Bucket, files: dict[str, bytes]) -> None:
    bucket.put(files)
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:GetObject",
        "Resource": "arn:aws:s3:::models/*",
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    bucket.client.put_bucket_policy(Bucket=PIRATE.bucket, Policy=json.dumps(policy))


@pytest.mark.parametrize(
    ("prepare", "error", "words"),
    [
        (nothing, AdapterFormatError, ("nothing is at s3://models/loras/pirate",)),
        (nested, AdapterFormatError, ("step-100", "name one of them")),
        (pickle_only, AdapterFormatError, ("adapter_model.bin alone", "never opened")),
        (no_weights, AdapterFormatError, (f"has no {WEIGHTS_FILE}", "save_pretrained")),
        (huge_config, AdapterFormatError, ("1,000,001 bytes long", "at most 1,000,000")),
        (forbidden, AdapterFetchError, ("refuses to show", "s3:GetObject", "AWS_ACCESS_KEY_ID")),
    ],
)
def test_what_is_no_adapter_says_what_to_do(
    bucket: Bucket,
    adapter: Path,
    prepare: Callable[..., None],
    error: type[Exception],
    words: tuple[str, ...],
) -> None:
    prepare(bucket, {name: (adapter / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)})
    with pytest.raises(error) as caught:
        fetch_s3(PIRATE)
    assert all(each in str(caught.value) for each in words), caught.value
    assert kept() == []


def test_a_bucket_that_is_not_there() -> None:
    with pytest.raises(AdapterFetchError, match="there is no bucket nobody-has-this"):
        fetch_s3(S3Folder(bucket="nobody-has-this", prefix="it"))


def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(AdapterFetchError, match="there are no credentials; set AWS_ACCESS_KEY_ID"):
        fetch_s3(PIRATE)


def test_a_wrong_profile_or_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(AdapterFetchError, match=r"AWS settings \(ProfileNotFound, see the log\)"):
        fetch_s3(PIRATE)
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "store without scheme")
    with pytest.raises(AdapterFetchError, match="check AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL_S3"):
        fetch_s3(PIRATE)


def test_a_store_that_is_not_there_or_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://user:hidden@127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        monkeypatch.setattr(s3, "_RETRIES", 1)
        with pytest.raises(AdapterFetchError, match="does not answer") as caught:
            fetch_s3(PIRATE)
        assert "hidden" not in str(caught.value)
        silent.listen()
        monkeypatch.setattr(s3, "_READ_S", 0.05)
        with pytest.raises(AdapterFetchError, match=r"does not answer \(ReadTimeoutError\)"):
            fetch_s3(PIRATE)


class _Dripping(BaseHTTPRequestHandler):
    """A store that sends the first bytes of an object, and the others when `goes_on` is set."""

    goes_on: threading.Event

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("ETag", '"e"')
        self.send_header("Content-Length", "1000")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(b"x" * 10)
        self.wfile.flush()
        self.goes_on.wait(60)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_store_that_sends_next_to_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _Dripping.goes_on = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Dripping)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(least_rate, "_LEAST_S", 0.1)
    try:
        with pytest.raises(
            AdapterFetchError, match=r"s3://models/loras/pirate .* bytes have arrived in \d+ s;"
        ):
            resolve_adapter(str(PIRATE))
    finally:
        _Dripping.goes_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


def test_bytes_that_arrive_buy_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_rate, "_LEAST_S", 0.01)
    monkeypatch.setattr(least_rate, "_LEAST_BYTES_PER_S", 1e-3)
    (tmp_path / "part").write_bytes(b"x")
    looked_again = threading.Event()

    def fetch() -> Path:
        assert looked_again.wait(60)
        return tmp_path

    def kept_bytes() -> int:
        num_bytes = least_rate.bytes_below(tmp_path)
        if num_bytes > 1:
            looked_again.set()
        (tmp_path / "part").write_bytes(b"more")
        return num_bytes

    assert least_rate.fetch_at_least_rate("source", "place", fetch, kept_bytes) == tmp_path


def test_a_full_disk(bucket: Bucket, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put(adapter)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(AdapterFetchError, match="there is no room for s3://models/loras/pirate"):
        fetch_s3(PIRATE)


def test_what_killed_processes_left_is_removed(bucket: Bucket, adapter: Path) -> None:
    bucket.put(adapter)
    folder = fetch_s3(PIRATE)
    old, new = folder.parent / ".part-old", folder.parent / ".part-new"
    for part in (old, new):
        part.mkdir()
        (part / WEIGHTS_FILE).write_bytes(b"half")
    os.utime(old, (0, 0))
    bucket.put({CONFIG_FILE: changed(adapter)})
    fetch_s3(PIRATE)
    assert not old.exists()
    assert new.exists(), "another process may be writing it"


@pytest.mark.parametrize(
    "text",
    [
        "s3://", "s3:///it", "s3://B/it", "s3://a/it", "s3://bu..cket/it", "s3://models/../it", "s3://models//it",
        "s3://models/it/./x", "s3://models/a*", "s3://models/a b", "s3://models/a\nb", "s3://models/a?x=1",
        "s3://models/it#", "s3://models/it#../../etc", "s3://models/\ud800", "s3://models/" + "x" * 2000,
        "s3://user:password@models/it",
    ],
)  # fmt: skip
def test_odd_urls_are_no_sources(text: str) -> None:
    assert parse_s3(text) is None
    with pytest.raises(AdapterError, match="write one like s3://my-bucket/adapters/sql") as caught:
        locate_adapter(text)
    assert "password" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3:bucket/x", "two slashes"),
        ("s3:/bucket/x", "two slashes"),
        ("S3://bucket/x", "small letters"),
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://My_Bucket/x", "a bucket's name has"),
        ("s3://bucket/x/..", "the part . or .."),
        ("s3://bucket/x//y", "two slashes one after the other"),
        ("s3://bucket/a b", "its path has ' ' in it"),
        ("s3://bucket/x?X-Amz-Signature=1", "parameters behind ?"),
        ("s3://bucket/x#latest", "no revision"),
        ("s3://me:secret@bucket/x", "logins are not part of it"),
        ("s3://bucket/" + "x" * 2000, "more than 900 bytes"),
    ],
)
def test_an_odd_url_is_told_what_is_wrong_with_it(text: str, words: str) -> None:
    with pytest.raises(AdapterError, match=re.escape(words)):
        locate_adapter(text)


def test_the_whole_of_a_bucket_may_be_an_adapter() -> None:
    assert parse_s3("s3://bucket") == parse_s3("s3://bucket/") == S3Folder(bucket="bucket", prefix="")


def test_requests_fetch_only_what_a_pattern_opens() -> None:
    allowed = AllowedSources(["my-org/*", "s3://models/loras/*"])
    allowed.check(PIRATE)
    allowed.check(PIRATE.at("0" * 32))
    for other in (
        S3Folder(bucket="models", prefix="private/it"),
        S3Folder(bucket="others", prefix="loras/it"),
    ):
        with pytest.raises(PathNotAllowedError, match=f"--allow-adapter-repo {other.place} to open it"):
            allowed.check(other)
    with pytest.raises(PathNotAllowedError, match="is off"):
        AllowedSources(["*"]).check(PIRATE)
    for pattern in ("s3://*", "s3://mod*/x", "s3://", "s3://A/x"):
        with pytest.raises(AdapterError, match="names no bucket"):
            AllowedSources([pattern])


def test_file_urls_are_folders(tmp_path: Path) -> None:
    assert locate_adapter((tmp_path / "a b").as_uri()) == tmp_path / "a b"
    assert local_path("file:///srv/lora") == local_path("file://localhost/srv/lora") == "/srv/lora"
    assert local_path("FILE:/srv/lora") == "/srv/lora"
    assert local_path("my-org/sql") is None
    for text in ("file:relative", "file://host/x", "file:///x?y", "file:///x#y", "file:///%00", "file://[x"):
        with pytest.raises(AdapterError, match="no folder on this machine"):
            local_path(text)


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "botocore.session", None)
    with pytest.raises(AdapterFetchError, match=r"pip install 'loraplex\[s3\]'"):
        fetch_s3(PIRATE)


def test_a_disk_that_refuses(bucket: Bucket, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put(adapter)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(s3, "_download", refuse)
    with pytest.raises(AdapterFetchError, match=r"cannot be kept in .*\(Read-only file system\)"):
        fetch_s3(PIRATE)


def test_a_store_ends_with_the_test_that_fails() -> None:
    with pytest.raises(RuntimeError, match="the test"), s3_store() as url:
        raise RuntimeError("the test")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
