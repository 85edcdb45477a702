"""README and docs: snippets run, links lead somewhere, tables name real fields; the package says what it is."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import margingate_hf
from margingate_hf import MarginGateConfig, MarginGateStatistics
from margingate_hf.cli.parser import VERBS
from margingate_hf.config import PRESETS

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "kernels").glob("*.md")]


@pytest.mark.smollm2
def test_readme_snippets_run(smollm2: tuple[Any, Any], capsys: pytest.CaptureFixture) -> None:
    from margingate_hf.cli.checkpoints import fetch

    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len(snippets) >= 2
    names: dict[str, Any] = {}
    for snippet in snippets:
        local = snippet.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', repr(str(fetch())))  # the hub is not reached
        exec(compile(local, "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith("True The sea is"), "row 0 of a batch is not itself alone"


@pytest.mark.smollm2
def test_batching_snippet_runs(smollm2: tuple[Any, Any], capsys: pytest.CaptureFixture) -> None:
    model, tokenizer = smollm2
    snippet = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "batching.md").read_text(), flags=re.S)[0]
    names = {"model": model, "tokenizer": tokenizer, "MarginGateConfig": MarginGateConfig}
    exec(compile(snippet, "batching.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 4


def test_the_batching_page_names_the_engines_arguments() -> None:
    page = (ROOT / "docs" / "batching.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.M))
    parameters = list(inspect.signature(margingate_hf.MarginGateEngine.__init__).parameters)
    assert rows == set(parameters) - {"self", "model", "margin_gate"}


def test_the_first_screen_of_the_readme() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:50])
    for needed in ("make demo", "make test", "margin_gate=MarginGateConfig()", "with the gate |", "does not do"):
        assert needed in first, needed
    for searched in ("batch-invariant", "deterministic", "reproducible"):
        assert searched in "\n".join(first.splitlines()[:8]), searched


def rows_of(table: str) -> list[list[str]]:
    """Cells of a Markdown table's body."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_readme_table_is_the_committed_result() -> None:
    readme = (ROOT / "README.md").read_text()
    table = rows_of(readme.split("<!-- demo table: begin -->")[1].split("<!-- demo table: end -->")[0])
    result = {(row[0], row[1]): row for row in rows_of((ROOT / "evals" / "results" / "demo.md").read_text())}
    assert len(table) >= 4
    for size, stock, exact, time in table:
        assert result["stock", size][2] == stock
        assert result["exact", size][2] == exact and result["exact", size][-1] == time


RETIRED = re.compile(
    r"\bcompany\b|\bcertif|\bfast (?:path|step|steps)\b|\bverifier pass|\bparting\b|kv_planes|rows_per_pass"
    r"|\bmax_rows\b"
    r"|\btexts that move|\bgated text|coverage=.full|DecodeGeometry|VerifyGeometry|\brow_steps\b|\bPrefixStore\b"
    r"|\bColumnStore\b|the aim:|Not reached:"
)


@pytest.mark.parametrize(
    "path", [*PAGES, *(ROOT / "src").rglob("*.py")], ids=lambda path: str(path.relative_to(ROOT)).replace("/", ".")
)
def test_retired_words_stay_out(path: Path) -> None:
    """Words that docs/glossary.md replaces, in pages, docstrings and messages. The change log tells history."""
    if path.name != "CHANGELOG.md":
        found = RETIRED.search(path.read_text())
        assert found is None, f"{path.name}: {found and found[0]!r}; docs/glossary.md has the word"


def test_the_glossary_stays_short() -> None:
    assert len(re.findall(r"^\| \*\*", (ROOT / "docs" / "glossary.md").read_text(), flags=re.M)) <= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_configuration_page_names_every_field_and_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, flags=re.M))
    fields = {field.name: field.default for field in dataclasses.fields(MarginGateConfig)}
    assert rows.keys() == fields.keys()
    for name, default in fields.items():
        assert rows[name].strip("`").replace('"', "") == str(default)
    presets = dict(re.findall(r'^\| `"(\w+)"` \| (.*?) \|', page, flags=re.M))
    assert presets.keys() == PRESETS.keys()
    for name, preset in PRESETS.items():
        for field, value in (preset.fields or {}).items():
            shown = f'"{value}"' if isinstance(value, str) else str(value)
            assert f"{field}={shown}" in presets[name]


def test_generated_parts_are_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for (name, part), make in module.PARTS.items():
        page = (ROOT / "docs" / name).read_text()
        assert page == module.filled(page, part, make()), f"python docs/generate.py rewrites {name}"


@pytest.mark.smollm2
def test_replay_snippet_runs(smollm2: tuple[Any, Any], capsys: pytest.CaptureFixture) -> None:
    model, tokenizer = smollm2
    snippet = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "audit_and_replay.md").read_text(), flags=re.S)[0]
    exec(compile(snippet, "audit_and_replay.md", "exec"), {"model": model, "tokenizer": tokenizer})
    assert capsys.readouterr().out.strip() == "True"


def test_the_commands_page_names_every_verb() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert all(f"margingate {verb}" in page for verb in VERBS)


def test_the_statistics_page_names_real_fields() -> None:
    page = (ROOT / "docs" / "statistics.md").read_text()
    for cell in re.findall(r"^\| (`.*?) \|", page, flags=re.M):
        for name in re.findall(r"`(\w+)`", cell):
            assert hasattr(MarginGateStatistics(), name), name


def test_the_kernels_page_holds_the_committed_resource_table() -> None:
    from tests.kernels.resource_table import as_markdown

    page = (ROOT / "docs" / "kernels.md").read_text()
    table = page.split("<!-- resources: begin -->")[1].split("<!-- resources: end -->")[0].strip()
    assert table == as_markdown(), "python tests/kernels/resource_table.py prints the table"


def test_versions_agree() -> None:
    version = margingate_hf.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {version}" in citation
    for paper in ("2605.30218", "2506.09501"):
        assert paper in citation


def test_every_public_name_exists_and_is_documented() -> None:
    for name in margingate_hf.__all__:
        assert getattr(margingate_hf, name).__doc__, name


def test_layout() -> None:
    for needed in ("src/margingate_hf/py.typed", "kernels/build.toml", "LICENSE", "CHANGELOG.md", ".ci/run", "evals"):
        assert (ROOT / needed).exists(), needed
    assert not (ROOT / "kernels" / "__init__.py").exists(), "would hide the Hugging Face `kernels` library"
    for path in (ROOT / "kernels").rglob("*.py"):
        assert "margingate_hf" not in re.sub(r'""".*?"""', "", path.read_text(), flags=re.S), path
