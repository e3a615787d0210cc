"""The tenants file: read strictly, changed by commands, and read again by a server when it changes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from server_fixtures import stored
from typer.testing import CliRunner

from loraplex.cli.main import app
from loraplex.core.clock import ManualClock
from loraplex.core.tenants import TenantPolicy
from loraplex.server.tenants import tenants_watch
from loraplex.server.tenants.keys import StoredKey
from loraplex.server.tenants.tenants import Tenants
from loraplex.server.tenants.tenants_edit import add_tenant, rotate_key
from loraplex.server.tenants.tenants_file import (
    AdapterSlo,
    TenantsFile,
    TenantsFileError,
    parse_tenants,
    read_text,
)
from loraplex.server.tenants.tenants_watch import TenantsWatch

FILE = Path("tenants.toml")
KEY = stored("k")


def _unused(*args: object) -> str:
    raise AssertionError("not needed yet")


def parse(text: str) -> TenantsFile:
    return parse_tenants(text, FILE)


def test_patterns_and_folders_of_tenants_without_requests_are_only_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Of a file with thousands of tenants, most have no requests before the next change.
    with monkeypatch.context() as patched:
        patched.setattr("fnmatch.translate", _unused)
        patched.setattr("os.path.realpath", _unused)
        patched.setattr(Path, "resolve", _unused)
        file = parse(f"[tenants.a]\nkeys = [{KEY}]\nadapters = ['a-*']\nload_from = ['/srv/a', 'a/*']")
        Tenants(file, ManualClock()).replace(file)
    tenant = file.tenants["a"]
    assert [tenant.adapters.match(name) for name in ("a-x", "b-x")] == [True, False]
    assert tenant.sources.paths.roots == (Path("/srv/a"),)


def test_everything_that_the_file_says_is_there() -> None:
    file = parse(
        f"""
        share_prefix_cache = true
        [tenants.acme]
        keys = [{KEY}]
        adapters = ["acme-*", "team/*"]
        base_model = false
        administers = ["acme-?"]
        requests_per_minute = 60
        tokens_per_minute = 1_000
        max_in_flight = 8
        share = 2
        priority = -1
        slo_ttft = 0.5
        slo_tpt = "50ms"
        [tenants.nobody]
        [adapters."acme-chat"]
        slo_ttft = "250ms"
        """
    )
    acme = file.tenants["acme"]
    assert (acme.policy.name, acme.policy.share, acme.policy.priority) == ("acme", 2.0, -1)
    assert (acme.policy.slo_ttft, acme.policy.slo_tpt) == (0.5, 0.05)
    limits = acme.limits
    assert (limits.requests_per_minute, limits.tokens_per_minute, limits.max_in_flight) == (60, 1000, 8)
    assert [acme.adapters.match(name) for name in ("acme-x", "Acme-x", "xacme-x", "team/a/b", "acme")] == [
        True, False, False, True, False
    ]  # fmt: skip
    assert (acme.administers.match("acme-x"), acme.administers.match("acme-xy")) == (True, False)
    assert (acme.uses_base, file.tenants["nobody"].uses_base) == (False, True)
    assert file.adapter_slos == {"acme-chat": AdapterSlo(slo_ttft=0.25)}
    assert file.shares_prefix_cache


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[tenants.acme\n", "not valid TOML: .*line 1"),
        ("[tenants.a]\n[tenants.a]\n", r"not valid TOML: .*line 2"),
        ("[tenants.a]\n[tenants.A]\n", "'a' and 'A' differ in case only"),
        (f"[tenants.a]\nkeys = [{KEY}]\n[tenants.b]\nkeys = [{KEY}]", r"and \[tenants.b\] have the same key"),
        (f"[tenants.a]\nkeys = [{KEY}, {KEY.upper().replace('SHA', 'sha')}]", "have the same key"),
        ("[tenant.a]\n", "no option 'tenant'; did you mean 'tenants'"),
        ("[tenants.a]\nadapter = []", r"\[tenants.a\]: there is no option 'adapter'; did you mean 'ada"),
        ("[tenants.a]\nzzz = []", "there are: .*requests_per_minute"),
        ("[tenants.a]\nkeys = ['secret']", r"\[tenants.a\] keys: a key is stored as"),
        (f"[tenants.a]\nkeys = ['{KEY[1:-1]} until tomorrow']", "'tomorrow' is no time with a time zone"),
        (f"[tenants.a]\nkeys = ['{KEY[1:-1]} until 2030-01-01T00:00:00']", "is no time with a time zone"),
        (f"[tenants.a]\nkeys = ['{KEY[1:-1]} until 0001-01-01T00:00:00+05:00']", "is no time"),
        ("[tenants.a]\nkeys = 'sha256:00'", "keys: Expected `array`, got `str`"),
        ("[tenants.a]\nrequests_per_minute = 0", "requests_per_minute: Expected `int` >= 1"),
        ("[tenants.a]\nrequests_per_minute = -5", "requests_per_minute: Expected `int` >= 1"),
        ("[tenants.a]\nrequests_per_minute = 1.5", "requests_per_minute: Expected `int"),
        ("[tenants.a]\ntokens_per_minute = 9223372036854775807", "tokens_per_minute: Expected `int` <= "),
        ("[tenants.a]\ntokens_per_minute = nan", "tokens_per_minute: nan is no amount"),
        ("[tenants.a]\nmax_in_flight = true", "max_in_flight: Expected `int"),
        ("[tenants.a]\nshare = nan", "share: nan is no amount"),
        ("[tenants.a]\nshare = inf", "share: inf is no amount"),
        ("[tenants.a]\nshare = 0", "share: Expected `float` > 0"),
        ("[tenants.a]\nshare = 1e300", "share: Expected `float` <= 1000000"),
        ("[tenants.a]\nslo_ttft = -1", "slo_ttft: Expected `float` > 0"),
        ("[tenants.a]\nslo_ttft = '0s'", "slo_ttft: Expected `float` > 0"),
        ("[tenants.a]\nslo_ttft = 'soon'", "slo_ttft: 'soon' is no time; write it like 2s or 500ms"),
        ("[tenants.a]\nadapters = ['']", "adapters: '' can match no adapter"),
        ("[tenants.a]\nadapters = ['a[b]', 'é']", r"adapters: 'a\[b\]' can match no adapter"),
        ("[tenants.a]\nadministers = ['a b']", "administers: 'a b' can match no adapter"),
        ("[tenants.a]\nload_from = ['relative']", "load_from: write folders from the root on"),
        ("[tenants.a]\nload_from = [\"/x\\u0000\"]", "load_from: write folders"),
        ("[tenants.'']\n", "'' cannot be a tenant's name"),
        ("[tenants.'a b']\n", "'a b' cannot be a tenant's name"),
        ("[tenants.'a/b']\n", "'a/b' cannot be a tenant's name"),
        (f"[tenants.{'a' * 65}]\n", "cannot be a tenant's name"),
        ("tenants = 3", "'tenants' must hold tables"),
        ("tenants.a = 3", "'tenants' must hold tables"),
        ("share_prefix_cache = 'yes'", "neither true nor false"),
        (f"share_prefix_cache = 0x{'f' * 5000}", "neither true nor false"),
        (f"[tenants.a]\nshare = {'9' * 5000}", "not valid TOML: .*4300 digits"),
        ("[adapters.x]\nslo = 1", r"\[adapters.x\]: there is no option 'slo'; did you mean 'slo_t"),
        ("a = " + "[" * 5000, "not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(text: str, told: str) -> None:
    with pytest.raises(TenantsFileError, match=rf"^tenants\.toml.*{told}"):
        parse(text)


def test_what_is_no_readable_file_is_said_so(tmp_path: Path) -> None:
    pipe, binary, large = tmp_path / "pipe", tmp_path / "binary", tmp_path / "large"
    os.mkfifo(pipe)
    binary.write_bytes(b"a = '\xff'")
    with large.open("wb") as file:
        file.truncate(17 * 2**20)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, told in (
        (tmp_path, "is not a file"),
        (pipe, "is not a file"),
        (tmp_path / "missing", "loraplex tenant add"),
        (binary, "is not UTF-8 at byte 5"),
        (large, "more than 16,777,216 bytes"),
        (loop, "cannot be read"),
    ):
        with pytest.raises(TenantsFileError, match=told):
            read_text(path)


def test_a_key_is_valid_until_its_end() -> None:
    def found(until: timedelta) -> bool:
        key = StoredKey(digest=StoredKey.of("k").digest, until=datetime.now(UTC) + until)
        return Tenants(parse(f"[tenants.a]\nkeys = ['{key.text}']"), ManualClock()).find(b"k") is not None

    assert found(timedelta(hours=1))
    assert not found(timedelta(seconds=-1))


WRITTEN = """\
# Ours.
[tenants.first]  # who pays
adapters = ["a-*"]  # all of them

[tenants.second]
keys = [
    # of the old days
]
share = 2

[tenants.third]
keys = ['sha256:{0}']
"""


def test_commands_change_what_they_are_asked_to_and_keep_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(WRITTEN.format("1" * 64))
    path.chmod(0o640)
    before = tomllib.loads(path.read_text())["tenants"]
    keys = {"new": add_tenant(path, "new", {"adapters": ["n-*"], "load_from": ['/a "b"\\c']})}
    for name in before:
        keys[name] = rotate_key(path, name, timedelta(hours=1))
    text = path.read_text()
    after = tomllib.loads(text)["tenants"]
    assert [name for name in after if name in before] == ["first", "second", "third"]
    for name, table in before.items():
        assert {**after[name], "keys": None} == {**table, "keys": None}
    for comment in ("# Ours.", "# who pays", "# all of them"):
        assert comment in text
    assert path.stat().st_mode & 0o777 == 0o640
    tenants = Tenants(parse_tenants(text, path), ManualClock())
    for name, key in keys.items():
        access = tenants.find(key.encode())
        assert access is not None
        assert access.tenant == name
        assert key not in text
    assert re.fullmatch(r"sha256:1{64} until 20\d\d-.*Z", after["third"]["keys"][1])
    assert list(tmp_path.iterdir()) == [path]


def test_a_tenant_that_is_not_there_may_be_a_misspelt_one(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    for name in ("Acme", "globex"):
        add_tenant(path, name, {})
    with pytest.raises(TenantsFileError, match=r"there is no tenant 'acmee'; did you mean Acme\?"):
        rotate_key(path, "acmee", timedelta(0))
    with pytest.raises(TenantsFileError, match="there is no tenant 'zz'; there are Acme, globex"):
        rotate_key(path, "zz", timedelta(0))


def test_a_rotated_key_ends_at_once_or_after_its_grace(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    keys = [add_tenant(path, "acme", {})]
    assert path.stat().st_mode & 0o777 == 0o600
    for grace in (timedelta(hours=1), timedelta(minutes=1), timedelta(0)):
        keys.append(rotate_key(path, "acme", grace))

    def valid() -> list[bool]:
        tenants = Tenants(parse_tenants(path.read_text(), path), ManualClock())
        return [tenants.find(key.encode()) is not None for key in keys]

    assert valid() == [False, False, False, True]
    keys.append(rotate_key(path, "acme", timedelta(hours=1)))
    assert valid() == [False, False, False, True, True]


@pytest.mark.parametrize(
    "text", ["tenants = {acme = {}}\n", "[tenants]\nacme.share = 2\n", '[tenants."acme"]\nshare = 2\n']
)
def test_a_file_in_another_style_is_changed_rightly_or_not_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    for change in (lambda: add_tenant(path, "new", {}), lambda: rotate_key(path, "acme", timedelta(0))):
        before, told = path.read_text(), "by hand"
        try:
            change()
        except TenantsFileError as error:
            told = str(error)
            assert path.read_text() == before
        assert "by hand" in told
        parse_tenants(path.read_text(), path)


def test_many_commands_at_once_all_take_part(tmp_path: Path) -> None:
    path, names = tmp_path / "tenants.toml", [f"tenant-{number}" for number in range(24)]
    with ThreadPoolExecutor(8) as threads:
        keys = list(threads.map(lambda name: add_tenant(path, name, {}), names))
    tenants = Tenants(parse_tenants(path.read_text(), path), ManualClock())
    found = [tenants.find(key.encode()) for key in keys]
    assert [access.tenant for access in found if access is not None] == names


def test_a_command_that_is_killed_while_it_writes_leaves_the_file_and_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    add_tenant(path, "acme", {})
    before = path.read_text()
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from loraplex.server.tenants.tenants_edit import add_tenant\n"
        "Path.replace = lambda *given: os.kill(os.getpid(), signal.SIGKILL)\n"
        "add_tenant(Path(sys.argv[1]), 'killed', {})\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_text() == before
    add_tenant(path, "later", {})
    assert parse_tenants(path.read_text(), path).tenants.keys() == {"acme", "later"}


def test_the_command_prints_the_key_once_and_lists_without_it(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    environment = {"LORAPLEX_TENANTS": str(path), "COLUMNS": "200"}

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["tenant", *arguments], env=environment, catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    key = run("add", "acme", "--adapter", "acme-*", "--requests-per-minute", "60", "--operator").strip()
    assert re.fullmatch(r"lpx-[\w-]{43}", key)
    newer = run("rotate", "acme", "--grace", "24h").strip()
    listed = run("list")
    assert key not in listed + path.read_text()
    assert newer not in listed + path.read_text()
    for told in ("acme", "2, one until", "acme-*", "60", "operator"):
        assert told in listed
    bad = CliRunner().invoke(app, ["tenant", "rotate", "acme", "--grace", "soon"], env=environment)
    assert (bad.exit_code, "30m, 24h or 7d" in bad.output) == (2, True)
    bad = CliRunner().invoke(app, ["tenant", "add", "x", "--priority", "high"], env=environment)
    assert (bad.exit_code, "'high' is not a whole number" in bad.output) == (2, True)


@pytest.fixture
def watched(tmp_path: Path) -> tuple[Path, TenantsWatch]:
    path = tmp_path / "tenants.toml"
    path.write_text(f"[tenants.acme]\nkeys = [{KEY}]\nrequests_per_minute = 2\n")
    return path, TenantsWatch(path, ManualClock())


def test_a_changed_file_is_in_force_and_what_was_used_stays_used(watched: tuple[Path, TenantsWatch]) -> None:
    path, watch = watched
    first = watch.tenants.find(b"k")
    assert first is not None
    assert first.account is not None
    first.account.admit(1)
    told: list[Sequence[TenantPolicy]] = []
    watch.subscribe(told.append)
    asyncio.run(watch.look())
    assert len(told) == 1
    path.write_text(f"[tenants.acme]\nkeys = [{stored('other')}]\nrequests_per_minute = 5\nshare = 3\n")
    asyncio.run(watch.look())
    assert watch.tenants.find(b"k") is None
    found = watch.tenants.find(b"other")
    assert found is not None
    assert found.account is first.account
    assert found.account.requests_left == 4
    assert [[policy.share for policy in policies] for policies in told] == [[1.0], [3.0]]


def _break(path: Path) -> None:
    path.write_text("[tenants.acme]\nkyes = []")


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_break, "did you mean 'keys'"),
        (Path.unlink, "there is no tenants file"),
        (_replace_by_folder, "is not a file"),
        (lambda path: path.write_text("[tenants.ac"), "not valid TOML"),
        (lambda path: path.write_text(f"a = {'9' * 5000}"), "not valid TOML"),
        (lambda path: path.write_text(""), "has no tenants"),
        (lambda path: path.write_text("share_prefix_cache = true\n"), "has no tenants"),
    ],
)
def test_a_file_that_cannot_be_used_leaves_the_last_one_in_force(
    watched: tuple[Path, TenantsWatch],
    spoil: Callable[[Path], None],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, watch = watched
    text = path.read_text()
    spoil(path)
    for _ in range(3):
        asyncio.run(watch.look())
    assert watch.tenants.find(b"k") is not None
    assert told in (watch.tenants.trouble or "")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert told in warnings[0]
    if path.is_dir():
        path.rmdir()
    newer = path.with_suffix(".new")
    newer.write_text(text)
    newer.replace(path)
    asyncio.run(watch.look())
    assert watch.tenants.trouble is None
    assert watch.tenants.num_changes == 0, "it is the file that was in force"


def test_the_watch_goes_on_whatever_fails(
    watched: tuple[Path, TenantsWatch], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, watch = watched
    monkeypatch.setattr(tenants_watch, "INTERVAL_S", 0.0)
    parse = tenants_watch.parse_tenants
    in_force = asyncio.Event()

    def parse_what_is_no_defect(text: str, path: Path) -> TenantsFile:
        assert "defect" not in text
        return parse(text, path)

    def refuse(policies: Sequence[TenantPolicy]) -> None:
        assert len(policies) == 1, "this one takes no more"

    async def change() -> None:
        running = asyncio.create_task(watch.run())
        path.write_text("# defect")
        while watch.tenants.trouble is None:
            await asyncio.sleep(0)
        assert "AssertionError" in watch.tenants.trouble
        assert watch.tenants.find(b"k") is not None
        path.write_text("[tenants.acme]\n[tenants.other]\n")
        await in_force.wait()
        assert not running.done()
        assert watch.tenants.trouble is None
        running.cancel()

    watch.subscribe(refuse)
    watch.subscribe(lambda policies: in_force.set() if len(policies) == 2 else None)
    monkeypatch.setattr(tenants_watch, "parse_tenants", parse_what_is_no_defect)
    asyncio.run(asyncio.wait_for(change(), 30))
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert ["could not be put in force" in errors[0], "did not take" in errors[1]] == [True, True]


def test_a_server_does_not_start_without_a_usable_file(tmp_path: Path) -> None:
    with pytest.raises(TenantsFileError, match="there is no tenants file"):
        TenantsWatch(tmp_path / "missing", ManualClock())
    (tmp_path / "empty").touch()
    with pytest.raises(TenantsFileError, match="has no tenants; add one with: loraplex tenant add"):
        TenantsWatch(tmp_path / "empty", ManualClock())


def test_patterns_without_adapters_are_noted(watched: tuple[Path, TenantsWatch]) -> None:
    path, _ = watched
    path.write_text("[tenants.acme]\nadapters = ['acme-*', 'gone-*']\nadministers = ['x']")
    notes = TenantsWatch(path, ManualClock()).notes(["acme-chat"])
    assert len(notes) == 1
    assert "no adapter is served that matches 'gone-*', 'x'" in notes[0]
