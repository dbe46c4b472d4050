"""README.md: its code runs, its commands are the ones CI runs, its links lead somewhere."""

from __future__ import annotations

import io
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.meta.source import ENVIRONMENT, ROOT

README = (ROOT / "README.md").read_text("utf-8")
ADDRESS = "http://127.0.0.1:8000"
FOLDERS = ("src", "tests", "examples", "benchmarks", "tools", "docs")
KNOWN_FILES = [str(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]


def block(marker: str) -> str:
    """Return the code block that follows the comment `marker`."""
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)\n```\n", README, re.DOTALL)
    assert found, marker
    return found[1]


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a script, given as a file or as text, in this process, and return what it prints."""

    def run_script(script: Path | str, *arguments: str, text: str = "") -> str:
        path = script if isinstance(script, Path) else tmp_path / "script.py"
        if isinstance(script, str):
            path.write_text(script, "utf-8")
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def test_the_offline_code_generates(run_here):
    output = run_here(block("runs"))
    assert "The king said ->" in output and "Once upon a time ->" in output
    assert output.strip().splitlines()[-1]


def test_the_client_code_streams_an_answer(demo_server, run_here):
    output = run_here(block("runs with a server").replace(ADDRESS, demo_server.url))
    assert len(output.split()) > 3


def test_the_curl_command_is_answered(demo_server):
    found = re.fullmatch(r"curl (\S+) -H 'content-type: application/json' \\\n  -d '(.*)'", block("curl"))
    assert found
    status, answer = demo_server.post(found[1].removeprefix(ADDRESS), json.loads(found[2]))
    assert status == 200
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("script", ["chat_client.py", "streaming_client.py"])
def test_the_client_examples_run_against_a_server(demo_server, run_here, script):
    output = run_here(ROOT / "examples" / script, demo_server.url + "/v1", text="Hello!\nWhat is Quire?\n")
    assert len(output.splitlines()) >= 4


def test_the_offline_example_runs(run_here):
    output = run_here(ROOT / "examples" / "offline.py")
    assert output.count("->") == 3 and output.count("answer") >= 2


def test_examples_are_short():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text("utf-8").splitlines()) <= 60


@pytest.mark.parametrize("marker", ["serve", "test"])
def test_the_two_commands_are_one_line_each(marker):
    assert "\n" not in block(marker)
    assert block(marker).startswith("python3 -m venv ")


def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    extraction = re.search(r"command=\$\((awk '.*?' README\.md)\)", script)
    assert extraction
    done = subprocess.run(["bash", "-c", extraction[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == block("test")


def anchors(page: Path) -> set[str]:
    """Return what links may name within a page: its headings, as GitHub spells them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)}


def test_pages_that_the_code_refers_to_exist():
    named = {
        name for path in (ROOT / "src").rglob("*.py") for name in re.findall(r"docs/\w+\.md", path.read_text("utf-8"))
    }
    assert len(named) > 5
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_the_docs_exist(page):
    text = (ROOT / page).read_text("utf-8")
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if path.startswith("http"):
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"
    for path in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text):
        assert any(known.endswith(f"/{path}") for known in KNOWN_FILES), path


def test_the_tour_names_what_its_files_define():
    links = re.findall(
        r"\[`(?:\w+\.)?(?!py`)(\w+)`\]\(\.\./(src/[\w/]+\.py)\)", (ROOT / "docs/tour.md").read_text("utf-8")
    )
    assert len(links) > 10
    for name, path in links:
        assert re.search(rf"\b(def|class) {name}\b", (ROOT / path).read_text("utf-8")), (name, path)


def test_the_glossary_explains_names_that_there_are():
    code = " ".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    known = set(re.findall(r"\w+", code))
    rows = [
        row.split("|") for row in (ROOT / "docs/glossary.md").read_text("utf-8").splitlines() if row.startswith("|")
    ]
    terms = {term for _, *cells, _, _ in rows for cell in cells for term in re.findall(r"`([^`*]+)`", cell)}
    names = {name for term in terms if not term.endswith(".py") for name in re.findall(r"[A-Za-z_]\w+", term)}
    assert len(names) > 200
    assert names - known - {"py"} == set()


def test_the_documented_options_are_the_ones_there_are():
    from quire.cli.options_doc import document

    assert (ROOT / "docs" / "options.md").read_text("utf-8") == document(), (
        "run: python -m quire.cli.options_doc > docs/options.md"
    )


def test_every_pin_satisfies_the_declared_range():
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {}
    for line in Path(ROOT, "constraints.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, line
            pins[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *(item for extra in extras.values() for item in extra)]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def test_the_step_benchmark_prints_its_table():
    words = ("--steps", "3", "--warmup", "1", "--running", "1", "2", "--waiting", "0", "5")
    command = [sys.executable, str(ROOT / "benchmarks" / "step_overhead.py"), *words]
    output = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
    rows = [line for line in output.splitlines() if line.startswith(("| 1 ", "| 2 "))]
    assert len(rows) == 4
    assert "commit" in output
