"""Pages, docstrings, messages and help texts are free of turns that stop readers. A rule says what to write instead.

Decisions are not looked at; nor are code, targets of links and comments.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncckpt.cli.commands import parser_of_all

REPOSITORY = Path(__file__).resolve().parents[2]
BEGIN = r"(?:^|(?<=[.;:] ))"  # Of a sentence or clause.
ARTICLE = r"(?:a|an|the|its|their|of|variables')"
WEAK = "more|page|this page|this|these|it|here|how|why|back|below|decision|the same|all of (?:it|them)|which ones"


class Rule(NamedTuple):
    """planted: a sentence that it finds, and no other rule."""

    pattern: str
    instead: str
    planted: str


RULES = (
    Rule(rf"\[(?:{WEAK})\]", "a link names what it leads to: write `[full results]`", "It is fast ([all of it](x))."),
    Rule(r"^\|(?:[ \t]*\|)+$", "a table without a head: write what its columns are", "| | |\n|---|---|\n| a | b |"),
    Rule(
        r"(?<![Tt]here )\b(?:is|are|was|were) no (?!(?:longer|more|less|need|use|way|different|\w+er)\b)[a-z`]+",
        "`is no file`: write `is not a file`",
        "This is no table.",
    ),
    Rule(
        r"(?<![Tt]here )\b(?:is|are|was|were) none\b(?! (?:the less|left))|\bthat (?:is|are) none\b",
        "`is none`: write `is not one`, `invalid`, `is missing`",
        "Such rows are none of ours.",
    ),
    Rule(r"\banew\b", "`anew`: write `again`, `new`, `from the start`", "It begins anew."),
    Rule(
        r"\b(?:is|are) said\b|\bsays? so\b|\bsaid so\b",
        "`says so`: a program warns, reports, returns or raises",
        "A warning says so.",
    ),
    Rule(
        rf"{BEGIN}[Oo]f (?:several|what|an?|the|all|each|two|these|those|one|it|them|its|tables?|tensors?|long)\b",
        "`Of several ranks, ...`: write `With several ranks, ...`, or the subject first",
        "Of several ranks, rank 0 does it.",
    ),
    Rule(
        r"(?:^|(?<=[.;:,] ))(?:[Ww]ho|[Ww]hoever) (?!(?:can|could|may|should|would|do|does|did|will|is it)\b)[a-z]+\b",
        "`whoever saves`: write which process, thread or user it is",
        "Whoever pins needs no lock.",
    ),
    Rule(
        r"\bso (?:many|much|long)\b(?! (?:as|that|since|before))",
        "`so many`: write `n`, or `this many`",
        "Keep so many of the newest.",
    ),
    Rule(r"\bbut for\b", "`but for`: write `except`", "All is equal but for its name."),
    Rule(rf"\b{ARTICLE}(?: \w+'s?)? begin\b", "`its begin`: write `its start`", "It is read from its begin."),
    Rule(
        r", for (?:it|they|nobody|somebody|no|then|there|many|most|others|rows may|one rank may) ",
        "`, for it`: write `because`",
        "It waits, for it has to.",
    ),
    Rule(r"\bas of an? [A-Z]|\bas (?:it )?ever\b", "`as of a Saver`: write `see Saver`", "The limit is as of a Saver."),
    Rule(
        r"\bc[ao]mes? to (?:its|an|their) end\b",
        "`comes to its end`: write `ends`, `finishes`",
        "The upload came to its end.",
    ),
)


def findings(texts: Iterator[tuple[str, str]]) -> list[str]:
    """Return what breaks a rule in paragraphs, each with its place: place, sentence, and what to write instead."""
    return [
        f"{place}: {sentence_at(text, found)!r}: {rule.instead}"
        for place, text in texts
        for rule in RULES
        for found in re.finditer(rule.pattern, text)
    ]


def sentence_at(text: str, found: re.Match[str]) -> str:
    end = text.find(". ", found.end())
    return text[text.rfind(". ", 0, found.start()) + 1 : len(text) if end < 0 else end + 1].strip()


def paragraphs_of(page: str) -> Iterator[str]:
    """Yield the prose of a page: lines of a paragraph joined, headings and rows of tables alone."""
    text = re.sub(r"^---\n.*?\n---\n|```.*?```|<!--.*?-->", "", page, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "`x`", text))
    for paragraph in re.split(r"\n(?=\s*(?:\n|[-*#|!]|\d+\. ))", text):
        yield " ".join(paragraph.split())


def docstrings_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                yield re.sub(r"\s*\n", " ", paragraph)


def messages_of(source: str) -> Iterator[str]:
    """Yield what errors are made of: the message, and `hint` and `expected`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error"):
            for part in (*node.args[:1], *(word.value for word in node.keywords if word.arg in ("hint", "expected"))):
                if isinstance(part, ast.JoinedStr):
                    yield "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in part.values)
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def pages() -> Iterator[tuple[str, str]]:
    found = (path for path in (REPOSITORY / "docs").rglob("*.md") if path.parent.name != "decisions")
    for path in (REPOSITORY / "README.md", *sorted(found)):
        for paragraph in paragraphs_of(path.read_text(encoding="utf-8")):
            yield path.relative_to(REPOSITORY).as_posix(), paragraph


def sources(texts_of: Callable[[str], Iterator[str]]) -> Iterator[tuple[str, str]]:
    for path in sorted((REPOSITORY / "asyncckpt").rglob("*.py")):
        for text in texts_of(path.read_text(encoding="utf-8")):
            yield path.relative_to(REPOSITORY).as_posix(), text


def help_texts() -> Iterator[tuple[str, str]]:
    parser, commands = parser_of_all()
    for one in (parser, *commands.values()):
        yield one.prog, one.description or ""
        for action in one._actions:
            yield f"{one.prog} {action.dest}", action.help or ""


def test_pages() -> None:
    assert findings(pages()) == []


def test_docstrings() -> None:
    assert findings(sources(docstrings_of)) == []


def test_messages() -> None:
    assert findings(sources(messages_of)) == []


def test_help_texts() -> None:
    assert findings(help_texts()) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.planted.partition("\n")[0])
def test_a_planted_sentence_is_found_by_its_rule_alone(rule: Rule) -> None:
    planted = f"# Page\n\nIt is\nsound.\n\n{rule.planted}\n\n```py\n# anew\n```\n\n`anew` [x](anew.md)\n"
    [found] = findings(("x.md", text) for text in paragraphs_of(planted))
    assert found.startswith("x.md: ")
    assert found.endswith(rule.instead)


def test_planted_docstrings_and_messages_are_found() -> None:
    source = '"""F.\n\nIt begins\nanew.\n"""\nraise UsageError(f"{f} is no f", hint="save it anew")\n'
    assert findings(("x.py", text) for text in docstrings_of(source)) == [
        "x.py: 'It begins anew.': `anew`: write `again`, `new`, `from the start`"
    ]
    assert len(findings(("x.py", text) for text in messages_of(source))) == 2
