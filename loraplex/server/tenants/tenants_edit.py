"""Changes of the tenants file from the command line.

The text is changed, not written anew, so that comments and the order of things stay. The result is read
again, and must differ from the file before in nothing else; then the file is replaced as a whole. A lock on
its folder keeps two changes at the same time apart.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from loraplex.core.whole_file import write_whole
from loraplex.core.words import unknown_name
from loraplex.server.tenants.keys import StoredKey, new_key
from loraplex.server.tenants.tenants_file import (
    TenantsFileError,
    parse_tenants,
    read_text,
    tenant_of,
)

_HEADING: Final = (
    '# The tenants of a loraplex server: docs/operations.md, "Tenants". It is read again when it changes.\n'
)
_MODE: Final = 0o600


def add_tenant(path: Path, name: str, options: Mapping[str, Any]) -> str:
    """Add a tenant to the file, which need not be there yet, and return its key. Raises TenantsFileError."""
    key = new_key()
    table = {"keys": [StoredKey.of(key).text], **options}
    tenant_of(name, table, path)  # is it valid?
    lines = "".join(f"{option} = {_toml(value)}\n" for option, value in table.items())

    def change(text: str, data: dict[str, Any]) -> str:
        tenants = data.setdefault("tenants", {})
        if name in tenants:
            raise TenantsFileError(
                f"{path} has a tenant {name!r} already; give it another key with: loraplex tenant rotate "
                f"{name}"
            )
        tenants[name] = table
        before = text or _HEADING
        return f"{before.rstrip()}\n\n[tenants.{name}]\n{lines}"

    _change(path, change, may_be_new=True)
    return key


def rotate_key(path: Path, name: str, grace: timedelta) -> str:
    """Give a tenant another key, and return it. The earlier ones are valid until the grace has passed. Raises
    TenantsFileError."""
    key, now = new_key(), datetime.now(UTC)

    def change(text: str, data: dict[str, Any]) -> str:
        table = data.get("tenants", {}).get(name)
        if table is None:
            raise TenantsFileError(f"{path}: {unknown_name('tenant', name, data.get('tenants', {}))}")
        old = table.get("keys", [])
        ending = (_ended(StoredKey.parse(each), now, grace) for each in old)
        table["keys"] = [StoredKey.of(key).text, *filter(None, ending)]
        return _with_keys(text, name, old, table["keys"])

    _change(path, change)
    return key


def _ended(key: StoredKey, now: datetime, grace: timedelta) -> str | None:
    """Return a key that ends with the grace, or earlier if it already would; None if it has ended."""
    until = (now + grace).replace(microsecond=0)
    if key.until is not None and key.until < until:
        until = key.until
    return StoredKey(digest=key.digest, until=until).text if until > now else None


def _with_keys(text: str, name: str, old: list[str], new: list[str]) -> str:
    """Return the text with other keys of a tenant; the caller checks that nothing else has changed."""
    if old:
        at = text.find(old[0])
        start, end = text.rfind("[", 0, at), text.find("]", at)
        return f"{text[:start]}{_toml(new)}{text[end + 1 :]}"
    heading = re.search(rf"^[ \t]*\[[ \t]*tenants[ \t]*\.[ \t]*{name}[ \t]*\].*$", text, re.MULTILINE)
    if heading is None:
        return text
    before, after = text[: heading.end()], text[heading.end() :]
    next_heading = re.search(r"^[ \t]*\[", after, re.MULTILINE)
    end = len(after) if next_heading is None else next_heading.start()
    after, beyond = after[:end], after[end:]
    line = f"keys = {_toml(new)}"
    rest, num_empty = re.subn(
        r"^[ \t]*keys[ \t]*=[ \t]*\[(?:\s|#.*)*\]", lambda _: line, after, count=1, flags=re.MULTILINE
    )
    return f"{before}{rest}{beyond}" if num_empty else f"{before}\n{line}{after}{beyond}"


def _change(path: Path, change: Callable[[str, dict[str, Any]], str], *, may_be_new: bool = False) -> None:
    """Change the file. `change` returns its text after the change, and makes the same change to its data."""
    with _locked(path):
        text = "" if may_be_new and not path.exists() else read_text(path)
        parse_tenants(text, path)
        wanted = tomllib.loads(text)
        changed = change(text, wanted)
        try:
            is_right = tomllib.loads(changed) == wanted
        except tomllib.TOMLDecodeError:
            is_right = False
        if not is_right:
            raise TenantsFileError(
                f"{path} is written in a way that this command cannot change; write each tenant as a table "
                "[tenants.NAME] with keys = [...], or change it by hand"
            )
        parse_tenants(changed, path)
        try:
            write_whole(path, changed, mode=_MODE)
        except OSError as error:
            raise TenantsFileError(
                f"{path} cannot be written ({error.strerror}); it is as it was before"
            ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other change of a file in this folder is under way, and hold others off. A lock on the
    file itself would be on the one that is about to be replaced. A process that is killed gives it back."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise TenantsFileError(
            f"the folder of {path} cannot be opened ({error.strerror}); make it first"
        ) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _toml(value: bool | int | float | str | list[str]) -> str:
    """Return a value in TOML, which writes these as JSON does."""
    return json.dumps(value, ensure_ascii=False)
