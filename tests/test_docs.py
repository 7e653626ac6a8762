"""The documentation is what the code is: commands, options, links, metrics, generated pages, README, shown outputs."""

import dataclasses
import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from quick import case, loop
from ticks import Ticks
from tiny import CONFIGS
from typer.main import get_command

import nextn
from nextn.audit_rules import IDS
from nextn.cli import app, progress, serve
from nextn.decoding.generate import Chunk
from nextn.decoding.records import Round, SequenceRound
from nextn.evaluate.faults import FAULTS
from nextn.family_table import disagreements, rows
from nextn.serve.metrics import ServerMetrics
from nextn.serve.request import EngineStats, GenerationChunk
from nextn.verify_checks import CHECKS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import make_benchmarks  # noqa: E402
import make_families  # noqa: E402
import make_outputs  # noqa: E402
import make_reference  # noqa: E402
import make_support  # noqa: E402
from check_site import defects  # noqa: E402
from scenes import SCENES  # noqa: E402

PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "bench" / "log.md")
    if path.name not in ("CHANGELOG.md", "CLAUDE.md")
)
COMMANDS = get_command(app).commands


def name_of(page):
    return str(page.relative_to(ROOT))


# Generated pages.


def test_outputs_hold_no_progress(capsys, monkeypatch):
    """Slow machines print it, quick ones do not."""
    ticks = Ticks()
    monkeypatch.setattr(progress, "Event", lambda: ticks)
    with progress.progress_bars(quiet=False) as added:
        for step in (added("texts at temperature 0.7", 3), added("layers", 3e9, in_gb=True)):
            step()
            ticks.tick()
            step(status="layer 2/3")
            ticks.tick()
    printed = {line: make_outputs.PROGRESS.search(line) for line in capsys.readouterr().err.splitlines()}
    assert len(printed) >= 4
    assert all(printed.values()), printed
    shown = [line for page in make_outputs.PAGES for found in make_outputs.BLOCK.finditer(page.read_text())
             for line in found[3].splitlines()]  # fmt: skip
    assert not list(filter(make_outputs.PROGRESS.search, shown))


@pytest.mark.parametrize("maker", [make_families, make_reference, make_benchmarks], ids=lambda maker: maker.__name__)
def test_generated_pages_are_fresh(maker):
    """The code or a record changed, and the page did not."""
    stale = [name_of(path) for path, text in maker.pages().items() if not path.exists() or path.read_text() != text]
    assert not stale, "stale: run `make docs`"


@pytest.mark.slow
def test_support_matrix_is_fresh():
    """It asks the code which backend a model of each family gets."""
    reasons = make_support.backends()
    assert reasons.keys() == {row.name for row in rows() if row.runs}
    stale = [name_of(path) for path, text in make_support.pages().items() if path.read_text() != text]
    assert not stale, "stale: run `make docs`"


def test_family_pages_need_no_torch():
    """The script is run where torch is not installed."""
    check = "import sys; sys.path.insert(0, 'docs'); import make_families; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True)


def test_no_page_of_a_family_is_left_over():
    """A family was renamed, and its old page stayed."""
    assert {path.stem for path in make_families.FOLDER.glob("*.md")} == {
        "index",
        *(row.name for row in make_families.ROWS),
    }


@loop("row", make_families.ROWS, ids=lambda row: row.name)
def test_each_family_has_a_complete_page(row):
    """A page without a fact of its row: a name, a source, a reason, a doubt."""
    reported = make_families.page(row)
    facts = [*row.model_types, *row.draft_types, *row.names.values(), *row.sources, *row.count_fields, *row.wrappers]
    facts += [make_families.text(each) for each in (*row.unverified, *disagreements(row), row.cannot_run)]
    facts += [make_families.text(note) for engine in row.engines.values() for note in engine.notes]
    assert [fact for fact in facts if fact not in reported] == []


def test_the_matrix_names_what_the_tests_train():
    assert set(CONFIGS) == {row.name for row in rows() if row.runs}
    assert set(make_support.MORE_FLAGS) <= {row.name for row in rows()}


@loop("page", PAGES, ids=name_of)
def test_tables_are_tables(page):
    """A sign in a cell that ends it: every line of a table has as many cells as its head."""
    width = 0
    for line in re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = re.sub(r"`[^`]*`", "", line).replace("\\|", "").count("|")
        assert not width or cells == width, line
        width = cells


@loop("page", PAGES, ids=name_of)
def test_tables_are_filled(page):
    """A figure that was to be measured: a cell with a name such as PEAK_INT8, outside of code, was left."""
    text = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", "", page.read_text(), flags=re.DOTALL)
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    names = set(re.findall(r"\b[A-Z]{3,}(?:_[A-Z0-9]+)+\b", rows))  # Q4_K_M is none
    assert names - {"OPENAI_API_KEY"} == set()


# What the reference pages must have.


def test_every_rule_is_explained():
    """A finding that its reader cannot look up."""
    reported = (DOCS / "reference" / "checkpoints.md").read_text()
    named = {rule for cell in re.findall(r"^\| (`.*?) \|", reported, re.M) for rule in re.findall(r"`([a-z-]+)`", cell)}
    assert named == set(IDS)


def test_every_check_is_explained():
    """A check that its reader cannot look up, in the order in which they run."""
    reported = (DOCS / "reference" / "verify.md").read_text()
    assert re.findall(r"^\| `([a-z-]+)` \|", reported, re.M) == list(CHECKS)


def test_help_documents_every_field():
    """Of public dataclasses, and of those that public functions yield."""
    for each in [*(getattr(nextn, name) for name in nextn.__all__), Chunk, Round, SequenceRound]:
        fields = [field for field in dataclasses.fields(each) if field.repr] if dataclasses.is_dataclass(each) else []
        text = inspect.getdoc(each)
        assert not [field.name for field in fields if f"\n    {field.name}: " not in text], each


def test_every_fault_and_every_public_name_is_explained():
    faults, python = make_reference.fault_page(), make_reference.python_page()
    assert [fault.name for fault in FAULTS if f"| `{fault.name}` |" not in faults] == []
    names = [name for name in nextn.__all__ if name not in make_reference.ALIASES]
    assert [name for name in names if not re.search(rf"^::: nextn\.[\w.]+\.{name}$", python, re.M)] == []


# Commands.


def shown_commands():
    """Every `nextn ...` of a code block or of inline code, as (page, words)."""
    for page in PAGES:
        text = page.read_text()
        blocks = "\n".join(re.findall(r"```(?:bash|console|yaml)?\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
        inline = re.findall(r"`((?:nextn|torchrun)[ -][^`]+)`", " ".join(text.split()))
        for line in (*blocks.splitlines(), *inline):
            found = re.search(r"(?:^|[$&|(] |run: |-m |/|^\s+)nextn ((?:[a-z]|-).*)", line)
            if found:
                yield name_of(page), re.split(r"\s#|\s[|>&;]|;", found[1])[0].split()


def parameters(words):
    """The options of the command that the words name; a group takes its own name and the next one."""
    command, rest = COMMANDS.get(words[0]), words[1:]
    if hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            return None, []
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@loop(
    ("page", "words"),
    sorted({(page, tuple(words)) for page, words in shown_commands()}),
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:50],
)
def test_shown_command_exists(page, words):
    """A command or an option in the README or the pages that the command line does not have."""
    if words[0].startswith("-"):
        assert words[0] in ("--help", "--version", "--install-completion", "--show-completion")
        return
    if words == ("canary",):
        return
    command, rest = parameters(words)
    assert command is not None, " ".join(words)
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    given = {word.partition("=")[0].rstrip(",.") for word in rest if re.match(r"--?[a-z]", word)}
    assert given <= options


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)`", page.read_text())}
    assert {"demo", "docs", "test", "check"} <= named
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


# Links.


def anchors(page):
    """The anchors of a Markdown page, as GitHub and the site make them of headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@loop("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    """A page that was moved, or a heading that was renamed."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for address in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in address:
            continue
        path, _, anchor = address.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), address
        made_by_site = target.suffix != ".md" or anchor.startswith("nextn.")  # of the Python API
        assert not anchor or made_by_site or anchor in anchors(target), address


def test_pages_that_the_code_names_exist():
    """Messages and comments that send the reader to a page."""
    sources = [ROOT / "Makefile", ROOT / ".ci" / "run", *(ROOT / ".github").rglob("*.yml")]
    sources += [path for folder in ("src", "bench", "docs", "examples") for path in (ROOT / folder).rglob("*.py")]
    file = re.compile(r"(?<!master/)\b(?:docs/[\w/-]+\.(?:md|json|py|svg)|bench/\w+\.md)\b")
    named = {name for path in sources for name in file.findall(path.read_text())}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_site_has_every_page():
    """A page that the menu does not lead to."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [leaf for each in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(each)]

    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    families = {page for page in pages if page.startswith("reference/families/")} - {"reference/families/index.md"}
    assert sorted(leaves(config["nav"])) == sorted(pages - families)


def test_defects_of_a_site_are_seen(tmp_path):
    """Dead links, dead anchors, missing pictures, empty pages and addresses elsewhere."""
    words = "word " * 60
    (tmp_path / "a.html").write_text(
        f'<article><h1 id="x">A</h1>{words}<a href="b.html">b</a><a href="#no">c</a><img src="p.svg"></article>'
        '<script src="https://elsewhere.example/x.js"></script><a href="https://elsewhere.example/">fine</a>'
    )
    (tmp_path / "c.html").write_text('<article>few<a href="a.html#x">a</a></article>')
    assert list(defects(tmp_path)) == [
        "a.html: fetches https://elsewhere.example/x.js",
        "a.html: b.html: no such file",
        "a.html: #no: no such anchor",
        "a.html: p.svg: no such file",
        "c.html: 0 first-level headings",
        "c.html: 2 words",
    ]


# Shown outputs.


@pytest.mark.more
@pytest.mark.parametrize(
    "scene",
    [case(scene, quick=scene.name == "readme") for scene in SCENES if not scene.slow],
    ids=lambda scene: scene.name,
)
def test_shown_output_is_what_the_commands_print(scene):
    """The output of a command changed, and the page did not. Figures may differ."""
    page = make_outputs.page_of(scene.name)
    text = page.read_text()
    assert make_outputs.same(make_outputs.regenerated(scene, text), text), "stale: run `make docs`"


def test_every_shown_output_has_its_scene():
    named = {name for page in PAGES for name in re.findall(r"<!-- output: ([\w-]+) -->", page.read_text())}
    assert named == {scene.name for scene in SCENES}


def test_what_varies_between_runs_is_ignored():
    same = make_outputs.same
    assert same("a_1 0.95 (0.90-0.97)  0.3 s\n", "a_1  0.99 (0.98-1.00)  12.0 s\n")
    assert same("trunk 0908aef22198", "trunk e9b42e2948ff")
    assert not same("clean  tuned", "not clean  tuned")


README = (ROOT / "README.md").read_text()


def test_clients_ask_for_the_model_that_the_commands_serve(tmp_path, monkeypatch):
    """A folder called `model` is served under another name, and a request for an unknown name is refused."""
    page = (DOCS / "how-to" / "serve-clients.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("path/to/tuned").mkdir(parents=True)
    served = {serve._default_name(source) for source in re.findall(r"^nextn serve (\S+)", page, re.MULTILINE)}
    asked = re.findall(r"(?:^model = \"|ANTHROPIC_MODEL=|^ *model=|profile -m )([\w/]+)", page, re.MULTILINE)
    assert len(asked) == 4
    assert {*asked} == served


@pytest.mark.more
def test_python_blocks_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        exec(compile(code, "README.md", "exec"), {})


def test_readme_is_short():
    """What is longer belongs into docs."""
    assert len(README.splitlines()) <= 150


PAGE = (DOCS / "reference" / "metrics.md").read_text()
DASHBOARD = json.loads((DOCS / "assets" / "grafana-nextn.json").read_text())
NAME = re.compile(r"nextn:[a-z0-9_]+")


@pytest.fixture(scope="module")
def series():
    """Sample names of a server that has seen a request and an error -> their labels."""
    metrics = ServerMetrics("tiny", lambda: EngineStats(1, 2, 3, 4, 5, 6, 7, 8))
    one = SequenceRound(0, (1, 2), 1, (1, 3), "eos")
    copied = SequenceRound(0, (1, 2), 1, (1, 3), "eos", copied=True)
    metrics.observe(GenerationChunk("x", (one, copied), finish="eos"), since_submitted=0.1, since_chunk=0.1)
    metrics.count_error(400)
    lines = [line for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        name, _, labels = line.partition(" ")[0].partition("{")
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def base(name):
    """Without the suffix of a histogram's samples."""
    return re.sub("_(bucket|sum|count|created)$", "", name)


def expressions():
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [*panels, *re.findall(r"`([^`]*rate\([^`]*)`", PAGE)]


def test_the_page_lists_every_series(series):
    listed = set(re.findall(r"^\| `(nextn:[a-z_0-9]+)` \|", PAGE, re.MULTILINE))
    assert listed == {base(name) for name in series if not name.endswith("_created")}


def test_the_types_and_labels_of_the_page(series):
    """The third cell has the labels beside model_name."""
    rows = re.findall(r"^\| `(nextn:\w+)` \| (\w+) \| ([^|]*)\|", PAGE, re.MULTILINE)
    for name, kind, labels in rows:
        samples = [each for each in series if base(each) == name and not each.endswith("_created")]
        own = set().union(*(series[each] for each in samples)) - {"model_name", "le"}
        assert set(re.findall(r"`(\w+)`", labels)) == own, name
        assert kind == ("histogram" if len(samples) > 1 else "counter" if name.endswith("_total") else "gauge")


@loop("expression", expressions())
def test_queries_name_series_and_labels_that_exist(expression, series):
    names = NAME.findall(expression)
    assert names
    assert set(names) <= set(series)
    labels = {label for name in names for label in series[name]}
    used = re.findall(r'(\w+)=~?"', expression) + re.findall(r"(?:by|ignoring) \(?\((\w+)\)", expression)
    assert set(used) <= labels
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_shows_every_series(series):
    shown = {base(name) for panel in DASHBOARD["panels"] for t in panel["targets"] for name in NAME.findall(t["expr"])}
    assert shown == {base(name) for name in series if not name.endswith("_created")}


def test_the_dashboard_can_be_imported():
    """The fields that Grafana requires; panels have unique ids and do not overlap."""
    assert DASHBOARD["schemaVersion"] >= 36
    assert {"uid", "title", "panels", "templating", "time"} <= set(DASHBOARD)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    ids, cells = set(), set()
    for panel in DASHBOARD["panels"]:
        assert {"id", "type", "title", "description", "gridPos", "targets", "fieldConfig", "options"} <= set(panel)
        assert panel["datasource"]["uid"] == "${datasource}"
        ids.add(panel["id"])
        x, y, width, height = (panel["gridPos"][key] for key in "xywh")
        area = set(itertools.product(range(x, x + width), range(y, y + height)))
        assert not area & cells
        assert x + width <= 24
        cells |= area
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}
    assert len(ids) == len(DASHBOARD["panels"])
