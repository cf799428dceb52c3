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
WEAK = "more|page|this page|this|these|it|here|how|why|back|below|decision|the same|all of (?:it|them)|which ones"
IS = r"(?<![Tt]here )\b(?:is|are|was|were)"
ADVERBS = r"(?:longer|more|less|need|use|way|different|\w+er)\b"  # "is no longer" is right.
OF = "several|what|an?|the|all|each|two|these|those|one|it|them|its|tables?|tensors?|long"
ASKS = "can|could|may|should|would|do|does|did|will|is it"  # "Who can load it?" is right.
LEFT = ("; of what is not, a filter_func loads one of both",)  # It goes when that message is changed.
FOR = "it|they|nobody|somebody|no|then|there|many|most|others|rows may|one rank may"


class Rule(NamedTuple):
    """planted: a sentence that it finds, and no other rule."""

    pattern: str
    instead: str
    planted: str


RULES = (
    Rule(rf"\[(?:{WEAK})\]", "a link names what it leads to: `[full results]`", "It is fast ([all of it](x))."),
    Rule(r"^\|(?:[ \t]*\|)+$", "a table has a head: what its columns are", "| | |\n|---|---|\n| a | b |"),
    Rule(rf"{IS} no (?!{ADVERBS})[a-z`]+", "`is no file`: write `is not a file`", "This is no table."),
    Rule(rf"{IS} none\b(?! (?:the less|left))|\bthat (?:is|are) none\b", "`none`: write `not one`", "They are none."),
    Rule(r"\banew\b", "`anew`: write `again`, `new` or `from the start`", "It begins anew."),
    Rule(
        r"\b(?:is|are) said\b|\bsa(?:ys?|id) so\b", "`says so`: write `warns`, `reports`, `raises`", "The log says so."
    ),
    Rule(rf"(?:^|(?<=[.;:] ))[Oo]f (?:{OF})\b", "`Of several`: write `With several`", "Of several ranks, one does it."),
    Rule(
        rf"(?:^|(?<=[.;:,] ))[Ww]ho(?:ever)? (?!(?:{ASKS})\b)[a-z]+\b", "`who`: name the actor", "Who pins needs none."
    ),
    Rule(r"\bso (?:many|much|long)\b(?! (?:as|that|since|before))", "`so many`: write `n`", "Keep so many of them."),
    Rule(r"\bbut for\b", "`but for`: write `except`", "All is equal but for its name."),
    Rule(r"\b(?:a|an|the|its|their|of|variables')(?: \w+'s?)? begin\b", "`begin`: write `start`", "Go to its begin."),
    Rule(rf", for (?:{FOR}) ", "`, for it`: write `because it`", "It waits, for it has to."),
    Rule(r"\bas of an? [A-Z]|\bas (?:it )?ever\b", "`as of a Saver`: write `see Saver`", "It is as of a Saver."),
    Rule(r"\bc[ao]mes? to (?:its|an|their) end\b", "`comes to its end`: write `ends`", "It came to its end."),
)


def findings(texts: Iterator[tuple[str, str]]) -> list[str]:
    """Return what breaks a rule in texts, each with its place: place, sentence, and what to write instead."""
    return [
        f"{place}: {sentence_at(text, found)!r}: {rule.instead}"
        for place, text in texts
        for rule in RULES
        for found in re.finditer(rule.pattern, text)
    ]


def sentence_at(text: str, found: re.Match[str]) -> str:
    begin, end = text.rfind(". ", 0, found.start()) + 1, text.find(". ", found.end())
    return text[begin : len(text) if end < 0 else end + 1].strip()


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
    """Yield all texts that are not docstrings: whatever may reach a user.

    Those that begin with "of " are left out: "of table 'user'" follows a name.
    """
    tree = ast.parse(source)
    left = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # Docstrings.
    left |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in left:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if not text.startswith("of "):
            yield text


def texts(paths: Iterator[Path], texts_of: Callable[[str], Iterator[str]]) -> Iterator[tuple[str, str]]:
    for path in sorted(paths):
        for text in texts_of(path.read_text(encoding="utf-8")):
            yield path.relative_to(REPOSITORY).as_posix(), text


def help_texts() -> Iterator[tuple[str, str]]:
    parser, commands = parser_of_all()
    for one in (parser, *commands.values()):
        yield one.prog, one.description or ""
        yield from ((f"{one.prog} {action.dest}", action.help or "") for action in one._actions)


def test_pages() -> None:
    pages = (path for path in (REPOSITORY / "docs").rglob("*.md") if path.parent.name != "decisions")
    assert findings(texts(iter([REPOSITORY / "README.md", *pages]), paragraphs_of)) == []


@pytest.mark.parametrize("texts_of", [docstrings_of, messages_of])
def test_the_package(texts_of: Callable[[str], Iterator[str]]) -> None:
    found = findings(texts((REPOSITORY / "asyncckpt").rglob("*.py"), texts_of))
    assert [one for one in found if not any(left in one for left in LEFT)] == []


def test_help_texts() -> None:
    assert findings(help_texts()) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.planted.partition("\n")[0])
def test_a_planted_sentence_is_found_by_its_rule_alone(rule: Rule) -> None:
    planted = f"# Page\n\nIt is\nsound.\n\n{rule.planted}\n\n```py\n# anew\n```\n\n`anew` [x](anew.md)\n"
    [found] = findings(("x.md", text) for text in paragraphs_of(planted))
    assert found.endswith(f": {rule.instead}")


def test_planted_docstrings_and_messages_are_found() -> None:
    source = '"""F.\n\nIt begins\nanew.\n"""\nraise UsageError(f"{f} is no f", hint="save it anew")\n'
    [found] = findings(("x.py", text) for text in docstrings_of(source))
    assert found.startswith("x.py: 'It begins anew.': `anew`: write `again`")
    assert len(findings(("x.py", text) for text in messages_of(source))) == 2


@pytest.mark.parametrize(
    "source",
    [
        'raise must_be("x", "begun anew", 1)',
        'warn("asyncckpt: it begins anew")',
        'log_warning("it begins anew %s", 1)',
        'what = "this is no file"',
        'raise UsageError("bad", hint="save anew" if a else "load it")',
        'raise UsageError("a" if b else f"begin {b} anew")',
        'raise PeerError("x", rank=0, cause="it is no rank")',
        'print("asyncckpt: begins anew", file=sys.stderr)',
        'problems.append("it is " "no table")',
        'made.add_argument("--x", help=f"{x} is no table")',
        'return {"x": ["it is no table"]}',
    ],
)
def test_a_planted_message_is_found_wherever_it_is_made(source: str) -> None:
    assert len(findings(("x.py", text) for text in messages_of(source))) == 1
