"""Hooks of mkdocs: the README is the first page of the site, headings have the anchors of GitHub, and links
out of docs/ lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

_ROOT: Final = Path(__file__).resolve().parent.parent
_HOME: Final = "index.md"
_LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)")


def on_config(config: Any) -> Any:
    """Give headings the anchors that they have on GitHub: links are written for these."""
    config["mdx_configs"]["toc"]["slugify"] = anchor
    return config


def anchor(heading: str, separator: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the first page."""
    files.append(File.generated(config, _HOME, content=(_ROOT / "README.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make links relative to docs/, and those to files outside of it absolute."""
    is_home = page.file.src_uri == _HOME
    folder = _ROOT if is_home else _ROOT / "docs"

    def target(match: re.Match[str]) -> str:
        path, hash_sign, heading = match[1].partition("#")
        if not path:
            return match[1]
        inside = (folder / path).resolve().relative_to(_ROOT).as_posix()
        if not (_ROOT / inside).exists():
            raise PluginError(f"{page.file.src_uri}: there is no file {inside}")
        if inside.startswith("docs/"):
            return inside.removeprefix("docs/") + hash_sign + heading
        return f"{config['repo_url']}/blob/main/{inside}{hash_sign}{heading}"

    return _LINK.sub(target, markdown)
