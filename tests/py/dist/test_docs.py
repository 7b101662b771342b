"""Every snippet of the README, docs/ and docstrings runs as written, or has a comment with the reason why not.
Everything that the pages name exists.

The language of a block decides how it is run:

- python: on two ranks of a live default group, with ``rank`` defined, all blocks of a page one after the other. A block
  that calls ``init_process_group`` is a program: torchrun starts it with two ranks.
- console, bash: line by line. Each line is a command of this package (``torch-sagellm ...``, ``python -m torch_sagellm
  ...``), possibly with variables before it. It must succeed and print something.
- rust: by rustdoc, if a comment of the crate includes the page.
- text, or none: no code, so it is not run.

Any other block that is not run has a comment with the reason before it: ``<!-- not run: ... -->``.

A text block after the comment ``<!-- output -->`` is the expected output of the last block before it that is run. For a
block of several commands it is the output of the last command. For a block that runs on ranks it is the output of rank
0. For a program under torchrun it has the lines of all ranks in any order. In such a block ``~7.7`` matches any number,
``...`` any text within a line, and a line of ``...`` any lines. The amount of white space does not matter.

Pages for users must follow further rules, which are below.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from harness import Context, beyond_gloo, run_fresh, run_script, torchrun

import torch_sagellm

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    "README.md",
    "SECURITY.md",
    "examples/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
#: Pages for developers of this package, besides docs/internals. All other pages of docs/ are for users.
BUILDERS = ("docs/design.md", "docs/words.md")
USERS = [page for page in PAGES if page.startswith("docs/") and "/internals/" not in page and page not in BUILDERS]
#: Pages for users that say what is missing, so they need not begin with a snippet.
WITHOUT_SNIPPET = ("docs/not-done.md",)
#: Text that belongs into pages for developers: source files, rule numbers, names of the core, instruction counts.
OF_BUILDERS = re.compile(
    r"\b(?:src|cpp|torch_ext|tests|benchmarks)/\w|\.ci/|\b[Rr]ules? \d|\b[Ii]nvariants? \d|\w::\w|\d instructions"
)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
BLOCK = re.compile(r"(?:^<!-- (?:not run: ([^\n]*?)|(output)) *-->\n)?^( *)```([^\n]*)\n(.*?)^\3```$", re.S | re.M)
#: Languages of blocks that the tests below run.
RUN = ("python", "console", "bash")
#: The parts of an expected output that match any number or any text.
OPEN = re.compile(r"(\.\.\.|~[\d.,]*\d|[ \t]+)")
#: A path in code type that begins with a folder of the project. The file must exist.
NAMED = re.compile(r"`((?:src|cpp|torch_ext|tests|benchmarks|examples|docs)/[\w./-]+)`")
#: The beginning of a line of code. A block that is text, or has no language, must not contain such a line.
CODE = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:import|export|pip|python|make|torchrun|cargo|torch-sagellm) ", re.M)
LINKED = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)

pytestmark = beyond_gloo("the pages are about this package")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    reason: str | None
    is_output: bool = False
    output: str | None = None

    @property
    def is_program(self) -> bool:
        return any("init_process_group(" in line.partition("#")[0] for line in self.code.splitlines())


def blocks(page: str, *languages: str) -> list[Block]:
    """Returns the blocks of a page. If languages are named, only the blocks in these languages."""
    text = (ROOT / page).read_text()
    every: list[Block] = []
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(5)) + 1
        block = Block(page, line, found[4], textwrap.dedent(found[5]), found[1], found[2] is not None)
        if block.is_output:
            at = max(i for i, each in enumerate(every) if each.reason is None and each.language in RUN)
            every[at] = replace(every[at], output=block.code)
        every.append(block)
    return [each for each in every if not languages or (each.language in languages and each.reason is None)]


def snippets(page: str) -> list[Block]:
    """Returns the Python blocks for ranks of a live group."""
    return [each for each in blocks(page, "python") if not each.is_program]


def programs() -> list[Block]:
    return [each for page in PAGES for each in blocks(page, "python") if each.is_program]


def commands() -> list[tuple[str, str, str | None]]:
    found = []
    for each in (each for page in PAGES for each in blocks(page, "console", "bash")):
        lines = [line for line in each.code.splitlines() if line.strip()]
        found += [(each.page, line, each.output if line is lines[-1] else None) for line in lines]
    return found


def pattern(line: str) -> str:
    """Returns the regular expression that matches one line of an expected output."""
    if line.strip() == "...":
        return r"(?:[^\n]*\n)*?"
    parts = []
    for part in OPEN.split(line.strip()):
        if part == "...":
            parts.append(r"[^\n]*?")
        elif part.startswith("~") and part[1:]:
            parts.append(r"\d[\d.,]*")
        else:
            parts.append(r"[ \t]+" if part.isspace() else re.escape(part))
    return "".join(parts) + r"\n"


def compare(where: str, expected: str, printed: str, *, in_order: bool = True) -> None:
    lines = [pattern(line) for line in expected.splitlines() if line.strip()]
    # torch logs this line if the machine's name service does not answer.
    said = [line.strip() for line in printed.splitlines() if "hostname of the client socket cannot" not in line]
    found = "".join(f"{line}\n" for line in said if line)
    if in_order:
        assert re.fullmatch("".join(lines), found), f"{where} prints\n{found}\nand the page says\n{expected}"
    for line in lines:  # the output of a program has the lines of all its ranks
        assert re.search(line.removesuffix(r"\n"), found), f"{where} prints\n{found}\nand not {line!r}"


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_says_why_not(page: str) -> None:
    text = (ROOT / page).read_text()
    found = blocks(page)
    assert 2 * len(found) == len(re.findall(r"^ *```", text, re.M)), f"{page}: a block is not closed"
    assert text.count("<!-- not run:") == sum(1 for each in found if each.reason), f"{page}: a reason without a block"
    for each in found:
        if each.reason is not None:
            assert len(each.reason.split()) > 2, f"{page}: {each.reason!r} is no reason"
        elif each.language == "yaml":
            assert each.reason, f"{page}: nothing runs a block of yaml"
        elif each.language == "rust":
            sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.rs"))
            assert f'/{page}")]' in sources, f"{page}: no comment of the crate takes it in"
        else:
            known = ("python", "console", "bash", "text", "")
            assert each.language in known, f"{page}: nothing runs a block of {each.language!r}:\n{each.code}"
            hidden = each.language in ("text", "") and CODE.search(each.code)
            assert not hidden, f"{page}: this block has code and no language:\n{each.code}"


def run_snippets(ctx: Context, page: str, found: list[tuple[int, str, str | None]], folder: str) -> None:
    """Runs blocks, each given as its first line, its code and its expected output. Files that they write are below
    `folder`."""
    os.chdir(folder)
    ctx.init()
    names = {"rank": ctx.rank}
    for line, code, output in found:
        source = "\n" * (line - 1) + code  # a traceback shows the lines of the page
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, page, "exec"), names)
        if output is not None and ctx.rank == 0:
            compare(f"{page}:{line}", output, printed.getvalue())


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_the_python_blocks_run_on_two_ranks(page: str, tmp_path: Path) -> None:
    found = [(each.line, each.code, each.output) for each in snippets(page)]
    run_fresh(run_snippets, 2, str(ROOT / page), found, str(tmp_path))


#: Examples of docstrings that are not run here, and why.
NOT_RUN = {
    "NCCLBackend": "needs its device: tests/py/device/test_api.py",
    "HCCLBackend": "needs its device: tests/py/device/test_api.py",
    "CNCLBackend": "needs its device: tests/py/device/test_api.py",
    "debug_handlers": "starts torch's server, which not every torch has: tests/py/dist/test_recorder.py",
    "convert_dumps": "needs the files of a failed group: tests/py/dist/test_stats.py",
}
#: The variables that the program around an example has.
GIVEN = {"recover": "gradient = torch.ones(4)"}
EXAMPLE = re.compile(r"^Example::\n\n((?:    .*\n?|\n)+)", re.M)


def test_the_examples_of_docstrings_run_on_two_ranks(tmp_path: Path) -> None:
    found = {}
    for name in torch_sagellm.__all__:
        example = EXAMPLE.search(inspect.getdoc(getattr(torch_sagellm, name)) or "")
        if example and name not in NOT_RUN:
            found[name] = f"# {name}\n{GIVEN.get(name, '')}\n{textwrap.dedent(example[1])}"
    assert (
        len(found) == len(set(torch_sagellm.__all__) - {"__version__", "Options", *NOT_RUN})
        and "all_gather" in found["CommBackend"]
    )
    source = "import torch\nimport torch.distributed as dist\n\nimport torch_sagellm\n\n" + "\n".join(found.values())
    (tmp_path / "examples.py").write_text(source)  # a traceback shows its lines
    run_fresh(run_snippets, 2, str(tmp_path / "examples.py"), [(1, source, None)], str(tmp_path))


@pytest.mark.parametrize("program", programs(), ids=lambda each: each.page)
def test_the_programs_run_under_torchrun(program: Block, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program.code)
    printed = torchrun(script, 2, warm=program != programs()[0])  # the first in a fresh interpreter
    if program.output is not None:
        compare(f"{program.page}:{program.line}", program.output, printed, in_order=False)


@pytest.mark.parametrize(("page", "line", "output"), commands(), ids=[f"{page}-{line}" for page, line, _ in commands()])
def test_the_commands_run(page: str, line: str, output: str | None) -> None:
    words, environment = shlex.split(line), {}
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    if words[0] == "torch-sagellm":
        words = ["python", "-m", "torch_sagellm", *words[1:]]
    assert words[:3] == ["python", "-m", "torch_sagellm"], f"{page}: {line}"
    done = run_script(words[1:], timeout=100, env=environment, warm=(page, line, output) != commands()[0])
    assert done.returncode == 0 and done.stdout.strip(), done.stdout
    if output is not None:
        compare(f"{page}: {line}", output, done.stdout)


@pytest.mark.quick
def test_an_output_that_differs_is_found() -> None:
    said = "took ~7.7 us\n...\nrank 0: ... of 2"
    compare("it", said, "took   12,000.5 us\nmore\nlines\nrank 0: 1 of 2\n")
    compare("it", said, "took 1 us\nrank 0: 1 of 2\n")
    for other in (
        "took some us\nrank 0: 1 of 2\n",
        "took 1 us\nrank 0: 1 of 3\n",
        "took 1 us\nrank 0: 1 of 2\nand more\n",
    ):
        with pytest.raises(AssertionError):
            compare("it", said, other)


@pytest.mark.quick
@pytest.mark.parametrize("page", USERS)
def test_a_page_for_users_is_about_what_they_do(page: str) -> None:
    """The page begins with a command or snippet and names nothing that only developers need. Dates are in one line,
    "Measured on"."""
    text = re.sub(r"<!--.*?-->", "", (ROOT / page).read_text())
    found = OF_BUILDERS.findall(text)
    assert not found, f"{page} names {found}: that belongs into docs/internals"
    dated = [line for line in text.splitlines() if DATE.search(line)]
    assert len(dated) <= 1 and all(line.startswith("Measured on ") for line in dated), dated
    if page not in WITHOUT_SNIPPET:
        assert len(text.partition("```")[0].split()) <= 110, f"{page}: the first command or snippet comes late"


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES)
def test_tables_have_a_head_and_equal_rows(page: str) -> None:
    text = re.sub(r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(), flags=re.S | re.M)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = table.splitlines()
        assert len(rows) > 2 and re.fullmatch(r"\|[ :|-]+\|", rows[1]), f"{page}: no head: {rows[0]}"
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, f"{page}: {rows[0]}"


@pytest.mark.quick
def test_the_measurements_for_users_are_those_of_the_notebook() -> None:
    notebook = (ROOT / "docs/internals/benchmarks.md").read_text()
    cells = re.findall(r"(?<=\| )[\d.]+ (?:us|ms|tokens/s)[^|\n]*?(?= \|)", (ROOT / "docs/measurements.md").read_text())
    missing = [cell for cell in cells if f"| {cell}" not in notebook]
    assert len(cells) > 12 and not missing, missing


@pytest.mark.quick
@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"])
def test_no_line_of_prose_is_too_wide(page: str) -> None:
    text = re.sub(r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(), flags=re.S | re.M)
    wide = [line for line in text.splitlines() if len(line) > 128 and not line.lstrip().startswith(("|", "!["))]
    assert not wide, f"{page}: {wide}"


@pytest.mark.quick
def test_the_pages_have_few_words() -> None:
    words = {page: len((ROOT / page).read_text().split()) for page in PAGES}
    assert sum(words[page] for page in USERS) <= 18_000, {page: words[page] for page in USERS}
    assert words["docs/design.md"] <= 4_000 and words["docs/measurements.md"] <= 700


@pytest.mark.quick
def test_every_description_says_what_the_project_is() -> None:
    import torch_sagellm

    what = (
        "One torch.distributed backend over shared memory, NCCL, HCCL and CNCL, with fusion, algorithm choice and "
        "statistics"
    )
    assert what in " ".join((ROOT / "README.md").read_text().replace("`", "").split())
    assert (torch_sagellm.__doc__ or "").startswith(what)
    for name in ("pyproject.toml", "Cargo.toml"):
        assert f'\ndescription = "{what}' in (ROOT / name).read_text(), name


@pytest.mark.quick
def test_the_first_screen_of_the_readme_is_one() -> None:
    """Before the first heading the README says what the package is for and how to try it. It shows a hang and figures,
    and says what is proven and what was missed."""
    first = (ROOT / "README.md").read_text().partition("\n## ")[0]
    assert len(first.splitlines()) <= 45
    figures = (ROOT / "docs/internals/benchmarks.md").read_text()
    for number in re.findall(r"\| ([\d.]+ (?:ms|us|tokens/s))", first):
        assert number in figures, f"the measurements have no {number}"
    hang = (ROOT / "torch_ext/torch_sagellm/demos/hang.py").read_text().splitlines()
    places = re.findall(r"hang.py:(\d+) in (\w+)", first)
    assert len(places) == 2
    for line, function in places:
        above = "\n".join(hang[: int(line)])
        assert re.findall(r"^def (\w+)", above, re.M)[-1] == function, f"line {line} is not in {function}"


@pytest.mark.quick
def test_the_dashboard_and_the_alerts_ask_for_metrics_that_exist() -> None:
    from torch_sagellm.observe import export

    made = {f"sagellm_{name}" for name, *_ in export.SUMS} | set(
        re.findall(r'"(sagellm_\w+)"', inspect.getsource(export))
    )
    panels = json.loads((ROOT / "docs/grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = re.findall(r"sagellm_\w+", " ".join(queries))
    assert len(queries) == len(panels) and len(asked) >= len(panels)
    asked += re.findall(r"(sagellm_\w+)\[", (ROOT / "docs/deployment.md").read_text())
    rules = (ROOT / "docs/alerts.yml").read_text()
    assert rules.count("- alert: ") == rules.count("expr: ") == rules.count("summary: ") == 3
    asked += re.findall(r"(sagellm_\w+)[\[)]", rules)
    assert {name.removesuffix("_bucket") for name in asked} <= made


@pytest.mark.quick
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_prometheus_takes_the_alerts_and_raises_them_when_it_should() -> None:
    for words in (["check", "rules", "docs/alerts.yml"], ["test", "rules", "tests/golden/alerts.yml"]):
        done = subprocess.run(["promtool", *words], cwd=ROOT, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.quick
def test_the_forms_of_issues_ask_for_what_commands_print() -> None:
    """The forms name commands that exist, and CITATION.cff names the version of this tree."""
    from torch_sagellm.cli.main import _parse

    forms = "".join(path.read_text() for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    commands = re.findall(r"`torch-sagellm ([^`]+)`", forms)
    assert len(commands) >= 4 and all(_parse(each.split()) for each in commands)
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)
    assert version and f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()


def anchor(heading: str) -> str:
    """Returns the name under which a heading is linked, as on the site and on forges."""
    plain = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w -]", "", plain).replace(" ", "-")


@pytest.mark.quick
@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_the_files_pages_and_headings_that_it_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = [name for name in NAMED.findall(text) if not (ROOT / name).exists() and "*" not in name]
    for name, heading in LINKED.findall(text):
        other = (ROOT / page).parent / name
        if not other.exists():
            missing.append(name)
        elif heading and heading not in {anchor(each) for each in HEADING.findall(other.read_text())}:
            missing.append(f"{name}#{heading}")
    for heading in re.findall(r"\]\(#([^)]*)\)", text):
        if heading not in {anchor(each) for each in HEADING.findall(text)}:
            missing.append(f"#{heading}")
    assert not missing, f"{page} names {missing}"
