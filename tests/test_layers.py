"""The shape of the package: imports point down, start-up stays light, public names are what is written down."""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from artifacts import publish
from typer.main import get_command

import nextn
from nextn.cli import app
from nextn.decoding.batch import DecodingBatch
from nextn.decoding.torch_rounds import TorchRounds

PACKAGE = Path(nextn.__file__).parent
# From the bottom to the top: a module or folder imports only what stands in an earlier row.
LAYERS = [
    ["errors", "text_format", "redaction"],
    ["settings", "devices", "bounded_http", "bounded_json"],
    ["family_table", "stats", "data", "losses"],
    ["checkpoint", "engines", "speculative"],
    ["cache", "edit"],
    ["audit_rules"],
    ["model"],
    ["runtime"],
    ["decoding", "environment"],
    ["evaluate"],
    ["train", "verify_checks"],
    ["conformance", "demo", "serve"],
    ["cli"],
]
# Lines of Python without the family rows.
LINE_BUDGET = 69_356
OPTION_BUDGET = 260  # of all commands
ANY_BUDGET = 42  # values of which mypy checks nothing; JSON is `JsonObject` or `JsonDict`, which say it once
# fmt: off
NO_TORCH = (
    "errors", "redaction", "bounded_http", "bounded_json", "family_table", "data.byte_tokenizer", "data.corpus",
    "data.sources", "data.batches", "data.degeneracy", "data.chat_template", "data.records", "data.benchmark_prompts",
    "stats.acceptance", "stats.intervals", "stats.speedup", "settings", "speculative.draft_policy",
    "speculative.measured_length", "speculative.copy_drafts",
    "checkpoint.remote", "checkpoint.safetensors_file", "checkpoint.checkpoint",
    "checkpoint.quantization", "checkpoint.quant_formats", "checkpoint.module_lists", "checkpoint.packed_layout",
    "checkpoint.head_inventory", "checkpoint.snapshot", "checkpoint.provenance", "audit_rules",
    "edit.restore", "edit.convert", "edit.export", "edit.gguf_export", "engines",
    "evaluate.workload", "verify_checks", "evaluate.acceptance_curve", "evaluate.exchange", "evaluate.load_advice",
    "evaluate.published_curves",
    "evaluate.likelihoods", "evaluate.hypotheses", "evaluate.engine_counters", "conformance.check",
    "conformance.engine_run", "conformance.record", "conformance.canary_model",
    "cli", "environment",
)
# fmt: on


# A folder counts as one module.
FILES = {
    path.stem: [path] if path.is_file() else sorted(path.rglob("*.py"))
    for path in PACKAGE.iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
}
del FILES["__init__"], FILES["__main__"]


def imports(name):
    """Our own modules that one imports, also inside functions and for annotations alone."""
    return {found for path in FILES[name] for found in _imports(path)} - {name}


def _imports(path):
    return (name.split(".")[0] for name in _modules(path))


@cache
def _modules(path):
    """Dotted, without our package's own name; `from nextn.train import loop` gives train.loop."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nextn"):
            home = node.module.removeprefix("nextn").lstrip(".")
            inner = [f"{home}.{alias.name}".lstrip(".") for alias in node.names]
            found += [name for name in inner if not name.startswith("__")]
    return found


def test_every_module_has_a_layer():
    named = {name for layer in LAYERS for name in layer}
    assert named == set(FILES)


@pytest.mark.more
def test_imports_point_down():
    below: set[str] = set()
    for layer in LAYERS:
        for name in layer:
            wrong = imports(name) - below - {"errors"}
            assert not wrong, f"{name} imports {sorted(wrong)}, which is not below it"
        below |= set(layer)


def test_imports_inside_a_folder_have_no_cycle():
    """Folders inside it count too: each file is a node."""
    cycles = {}
    for folder, paths in FILES.items():
        nodes = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in paths}
        graph = {}
        for node, path in nodes.items():
            names = {name if name in nodes else name.rpartition(".")[0] for name in _modules(path)}
            graph[node] = (names & set(nodes)) - {node}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycles[folder] = error.args[1]
    assert cycles == {}


def test_the_reading_path_is_short():
    """The files of developers/reading.md, with all that they import, need no native code, server or command line."""
    page = Path(__file__).parents[1] / "docs" / "developers" / "reading.md"
    paths = [PACKAGE / name for name in re.findall(r"^\d+\. `([\w/]+\.py)`", page.read_text(), re.M)]
    assert 7 <= len(paths) <= 10
    assert sum(path.read_text().count("\n") for path in paths) <= 1800
    reached, queue = set(), [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths]
    while queue:
        name = queue.pop()
        path = PACKAGE / Path(*name.split(".")).with_suffix(".py")
        if name not in reached and path.exists():
            reached.add(name)
            queue += _modules(path) + [each.rpartition(".")[0] for each in _modules(path)]
    assert {"decoding.torch_rounds", "model.trunk"} <= reached
    assert not [name for name in reached if name.startswith(("runtime.native", "serve.", "cli."))]
    assert DecodingBatch.torch_round is TorchRounds.torch_round


def test_one_file_imports_transformers_models():
    """transformers' models are made in transformers_loading, and loaded by layers in layer_loader; its cache base
    classes enter through cache layers."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path.stem not in ("transformers_loading", "layer_loader"):
            models = r"^\s*(from|import) .*(AutoModelFor|\.modeling_(?!rope_utils)|transformers\.models)"
            assert not re.search(models, text, re.M), path
        caches = ("layer_types", "attention_layer", "kv_cache", "recurrent", "rollout_cache", "family_caches")
        if path.stem not in (*caches, "trace_hooks"):
            assert "cache_utils" not in text


LIGHT = """
import importlib, sys

class Refused:
    seen = False

    def find_spec(self, name, *_):
        if name.split(".")[0] in ("torch", "transformers"):
            Refused.seen = True
            raise ImportError(name)

sys.meta_path.insert(0, Refused())
for name in sys.argv[1:]:
    Refused.seen = False
    try:
        importlib.import_module(f"nextn.{name}")
    except ImportError as error:
        print(name, error)
    else:
        if Refused.seen:
            print(name)
"""


@pytest.mark.more
def test_light_modules_do_not_import_torch():
    """All in one process, in which each module that does is named."""
    done = subprocess.run([sys.executable, "-c", LIGHT, *NO_TORCH], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
    done = subprocess.run([sys.executable, "-c", LIGHT, "model.model"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("model.model "), "the check sees nothing"


@pytest.mark.more
def test_an_address_at_which_nothing_answers_is_reported_before_torch_is_imported(tmp_path):
    (tmp_path / "prompts.txt").write_text("def add(a, b):")
    commands = "measure tiny", "diagnose tiny", "diagnose tiny --drive", f"answer tiny out.jsonl --prompts {tmp_path}"
    lines = [[*command.split(), "--engine", "127.0.0.1:9"] for command in commands]
    code = "import sys; from nextn.cli import app; from nextn.errors import EngineError\n"
    code += f"for line in {lines}:\n    try: app(line, standalone_mode=False)\n"
    code += "    except EngineError as error: assert 'nothing answers' in str(error)\n    else: assert False, line\n"
    code += "    assert not {'torch', 'transformers'} & set(sys.modules), line"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.more
def test_audit_does_not_import_torch(tmp_path):
    """The verb as a whole: every rule, of a checkpoint that sets some of them off."""
    publish(tmp_path, "deepseek_v4", copies=False)
    code = "import sys; from nextn.cli.audit import audit; import typer; app = typer.Typer(); app.command()(audit)\n"
    code += f"try: app(['{tmp_path}', '--json'])\nexcept SystemExit as end: assert end.code == 1\n"
    code += "assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "shared-missing" in done.stdout


def imported(*args):
    """Return the modules that a command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "nextn", *map(str, args)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.more
def test_commands_import_what_they_need(tmp_path):
    """What bench/startup.py measures, on any processor: the help and a local audit import no slow module."""
    assert not {"numpy", "httpx2", "torch", "transformers"} & imported("--help")
    audited = imported("audit", publish(tmp_path, "glm4_moe"))
    assert not {"httpx2", "torch", "transformers", "nextn.cli.bench", "nextn.cli.measure"} & audited


def test_public_names_resolve():
    """Each name of __all__ is there, sorted, and nothing heavy is imported before one is asked for."""
    assert sorted(nextn.__all__) == nextn.__all__
    assert all(getattr(nextn, name) is not None for name in nextn.__all__)
    assert set(nextn.__all__) <= set(dir(nextn))
    # A module of the same name would take the name's place as soon as anything imports it.
    assert not set(FILES) & set(nextn.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = nextn.nonsense


def test_line_budget():
    """Growth is a decision: raise the number in the change that needs it, and say why in developers/architecture.md."""
    rows = PACKAGE / "family_table" / "rows.py"  # facts, not code
    files = [path for path in PACKAGE.rglob("*.py") if path != rows]
    assert sum(path.read_text().count("\n") for path in files) <= LINE_BUDGET


def test_any_budget():
    paths = [path for path in PACKAGE.rglob("*.py") if "Any" in path.read_text()]
    assert sum(map(_num_any, paths)) <= ANY_BUDGET


def _num_any(path):
    """How often a file's code and its quoted annotations say `Any`."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    annotations = [getattr(node, name, None) or ast.Pass() for node in nodes for name in ("annotation", "returns")]
    quoted = [str(node.value) for each in annotations for node in ast.walk(each) if isinstance(node, ast.Constant)]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return names.count("Any") + len(re.findall(r"\bAny\b", " ".join(quoted)))


def test_number_of_options():
    """An option that nobody types is a field of a settings class."""
    top = get_command(app).commands.values()
    commands = [each for command in top for each in getattr(command, "commands", {"": command}).values()]
    options = [each for command in commands for each in command.params if each.param_type_name == "option"]
    assert len(options) <= OPTION_BUDGET
