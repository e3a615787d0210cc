from __future__ import annotations

import pytest

from loraplex.core.url_secrets import without_secrets
from loraplex.core.words import no_server, plural, unknown_name


@pytest.mark.parametrize(("number", "words"), [(0, "runs"), (1, "run"), (2, "runs"), (1.5, "runs")])
def test_a_noun_follows_its_number(number: float, words: str) -> None:
    assert plural("run", number) == words


def test_near_names_are_those_that_differ_in_case_too() -> None:
    assert unknown_name("adapter", "SQL-bto", ["sql-BOT", "poet"]) == (
        "there is no adapter 'SQL-bto'; did you mean sql-BOT?"
    )
    assert unknown_name("adapter", "x", []) == "there is no adapter 'x'; there are none"
    assert unknown_name("adapter", "x", [f"name-{i}" for i in range(5000)]).endswith("name-29 and 4,970 more")


def test_names_that_differ_in_case_alone_are_all_shown() -> None:
    assert unknown_name("adapter", "zzz", ["SQL", "sql"]) == ("there is no adapter 'zzz'; there are SQL, sql")
    assert unknown_name("adapter", "sqll", ["SQL", "sql"]).endswith("did you mean SQL or sql?")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:secret@host:1/a", "https://****@host:1/a"),
        ("https://host/a@b", "https://host/a@b"),
        ("s3://key:se/secret@bucket/x", "s3://****@bucket/x"),
        ("http://user:se#secret@host", "http://****@host"),
        ("http://a,http://user:secret@b", "http://****@b"),
        ("['http://a/', 'http://user:secret@b/']", "['http://a/', 'http://****@b/']"),
        ("https:/user:secret@host //user:secret@host", "https:/****@host //****@host"),
        ("http://host/x;token=secret/y", "http://host/x;token=****/y"),
        ("http://host/x#" + "secret" * 20, "http://host/x#****"),
        ("sql=s3://secret@bucket/x", "sql=s3://****@bucket/x"),
        ("http://host/x?X-Amz-Signature=secret&a", "http://host/x?X-Amz-Signature=****&****"),
        ("http://host/x?secret#token=secret", "http://host/x?****#token=****"),
        ("s3://bucket/x#0123", "s3://bucket/x#0123"),
        ("name=folder?a=b me@host", "name=folder?a=b me@host"),
    ],
)
def test_urls_are_shown_without_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert "secret" not in no_server(text, "nobody")
