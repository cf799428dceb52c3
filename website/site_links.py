"""Hooks of mkdocs: links that leave docs/ lead to copies within the site, so it needs no other host.

Pages link as one does in a repository: `../bench/results/x.txt`, `../CHANGELOG.md`. That is right where people read the
sources, and wrong on a site that has docs/ alone. Such a file becomes a file of the site, below `repository/`, and the
link follows it; what is a page outside of docs/ becomes one here. A link that leads nowhere stays, and mkdocs warns.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md"}
GENERATED = {"changes.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
PICTURE = re.compile(r"<img alt=\"([^\"]*)\" src=\"[^\"]*pictures/([\w-]+)\.svg\"[^>]*>")
SHOWN = (".txt", ".json", ".png")  # A browser shows these; anything else as text.


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages from outside of docs/, and every file that a page links to."""
    for page, source in GENERATED.items():
        files.append(File.generated(config, page, content=(REPOSITORY / source).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        for match in LINK.finditer(page.content_string):
            found = repository_path(match.group(2), page.src_uri)
            copied = found and copy_of(found)
            if found and copied and copied not in files.src_uris:
                files.append(File.generated(config, copied, content=readable(REPOSITORY / found)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def on_site(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups(default="")
        found = repository_path(target, page.file.src_uri)
        inside = found and (copy_of(found) or page_of(found))
        return f"{before}{posixpath.relpath(inside, folder or '.')}{anchor}{after}" if inside else match.group(0)

    return LINK.sub(on_site, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Put pictures into the page itself, so that they follow its colours."""
    return PICTURE.sub(lambda match: inline(match.group(2)), html)


def inline(name: str) -> str:
    return (REPOSITORY / f"docs/pictures/{name}.svg").read_text(encoding="utf-8").partition("?>\n")[2]


def repository_path(target: str, page: str) -> str | None:
    """Where a link of a page leads in the repository, if that is a file."""
    source = GENERATED.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return path if (REPOSITORY / path).is_file() else None


def page_of(path: str) -> str | None:
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)


def copy_of(path: str) -> str | None:
    if page_of(path):
        return None
    return f"repository/{path}" + ("" if path.endswith(SHOWN) else ".txt")


def readable(path: Path) -> str | bytes:
    """A file, with a mark in front of text: without it browsers guess the encoding of local files wrong."""
    content = path.read_bytes()
    if path.suffix in (".json", ".png"):
        return content
    return os.linesep.join(("\ufeff" + content.decode()).splitlines()) + os.linesep
