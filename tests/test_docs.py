"""README and guides are true: their Python runs, their links resolve, the commands they name exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from takifugu.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERY_PAGE = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*/*.md"))]
WITHOUT_PYTHON = {"report.md", "results.md", "supported.md"}
"""Pages that show no Python; a page is either listed here or has blocks that run."""


def blocks(page: Path, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```"
    return re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_pages_without_python_are_known() -> None:
    assert {page.name for page in PAGES if not blocks(page, "python")} == WITHOUT_PYTHON


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in WITHOUT_PYTHON], ids=lambda page: page.name
)
def test_python_blocks_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(page, "python")
    assert found, f"{page.name} has no Python block to run; list it in WITHOUT_PYTHON"
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in found:
        exec(compile(block, str(page), "exec"), names)


def test_the_example_recipe_is_one(tmp_path: Path) -> None:
    from takifugu.train import recipe as recipes

    (block,) = blocks(ROOT / "docs" / "training.md", "toml")
    (tmp_path / "mine.toml").write_text(block, encoding="utf-8")
    recipe = recipes.load(tmp_path / "mine.toml")
    table = tomllib.loads(block)
    assert recipe.about == table["about"]
    assert "rise" in recipes.load(table["base"]).schedule
    assert "rise" not in recipe.schedule, "removed by unset"


# ---- links ------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in anchors(linked)):
            yield target


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](page.md#one-two) [b](#three) [c](absent.md) [d](https://example.org/x)\n")
    assert list(broken_links(page)) == ["#three", "absent.md"]


# ---- commands ---------------------------------------------------------------------------------------------


def commands_in(text: str) -> Iterator[str]:
    """The `takifugu` commands in code: lines of indented or fenced blocks, and inline spans."""
    text = re.sub(r"\\\n\s*", " ", text)
    yield from re.findall(r"^\s*(?:\$ )?takifugu ([^`\n]*)", text, re.MULTILINE)
    yield from (re.sub(r"\s+", " ", span) for span in re.findall(r"`takifugu\s+([^`]+)`", text))


def mistake(words: str, command: Any) -> str | None:
    """What in a command line the command line interface does not have; None if it has all of it."""
    group = command
    for word in shlex.split(words.replace("...", ""), comments=True):
        if word in ("|", ">", "&&", ";"):
            break
        if word.startswith("-"):
            known = {"--help", *(opt for p in group.params for opt in (*p.opts, *p.secondary_opts))}
            if word.partition("=")[0] not in known:
                return f"{group.name} has no option {word}"
        elif hasattr(group, "commands"):
            if word not in group.commands:
                return f"{group.name} has no command {word!r}"
            group = group.commands[word]
    return None


@pytest.fixture(scope="module")
def cli() -> Any:
    return typer.main.get_command(app)


def test_mistakes_in_commands_are_noticed(cli: Any) -> None:
    assert mistake("train digits-small --set a=1  # --what", cli) is None
    assert mistake("train digits-small --steps 3", cli) == "train has no option --steps"
    assert mistake("trian digits-small", cli) == "takifugu has no command 'trian'"
    assert mistake("profile nodes", cli) == "profile has no command 'nodes'"
    assert list(commands_in("x\n\n    $ takifugu plan a\nsee `takifugu\nrun b`")) == ["plan a", "run b"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path, cli: Any) -> None:
    text = page.read_text(encoding="utf-8")
    assert [found for words in commands_in(text) if (found := mistake(words, cli))] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    for module in re.findall(r"python -m (benchmarks[\w.]*)", text):
        file = ROOT / Path(*module.split("."))
        assert file.with_suffix(".py").exists() or (file / "__init__.py").exists(), module
    for file in re.findall(r"`((?:src|tests|examples|docs|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (ROOT / file).exists(), file


def test_every_command_is_in_the_docs(cli: Any) -> None:
    named = {words.split()[0] for page in PAGES for words in commands_in(page.read_text()) if words.split()}
    assert set(cli.commands) <= named
