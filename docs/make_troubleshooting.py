"""Write docs/how-to/five-broken-heads.md: five broken heads, each really broken, audited, fixed and measured.

The models are the trained ones under tests/fixtures; the commands are run as shown.
"""

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PAGE = HERE / "how-to" / "five-broken-heads.md"
sys.path.insert(0, str(HERE.parent / "tests"))

from tiny import FIXTURES, refrain  # noqa: E402

from nextn.checkpoint.checkpoint import INDEX, Checkpoint, write_index  # noqa: E402
from nextn.checkpoint.head_inventory import Inventory  # noqa: E402
from nextn.checkpoint.quantization import QuantConfig  # noqa: E402
from nextn.checkpoint.safetensors_file import read_header  # noqa: E402
from nextn.checkpoint.tensors import FLOATS, TensorReader  # noqa: E402
from nextn.decoding.rounds import rounds  # noqa: E402
from nextn.edit.norm_shift import is_norm_weight  # noqa: E402
from nextn.model.head import Head  # noqa: E402
from nextn.model.load_head import trunk_state  # noqa: E402
from nextn.model.model import Model  # noqa: E402
from nextn.model.stored_layout import to_runtime_layout  # noqa: E402
from nextn.model.trunk import Trunk  # noqa: E402
from nextn.settings import Settings  # noqa: E402
from nextn.stats.acceptance import Acceptance  # noqa: E402

K = 4
INTRO = """\
# Troubleshooting: a head that does not draft

The text stays correct whatever is wrong with an MTP head, because the trunk (target model) verifies every draft. So
the only symptom of a broken head is a missing speedup, and no engine says why. `nextn audit MODEL` reads a checkpoint's
headers and a few small samples (also for a hub id) and names the cause; `nextn restore` and
`nextn convert` fix it.

Five causes, each with a small trained model that was broken on purpose. `make docs` runs the commands as shown; the
last two columns are the mean acceptance length (tokens per round) at K = 4, before and after the fix (1.00 = no draft
is ever accepted).

| Cause | Rule | Fix | Before | After |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Story:
    """One broken head."""

    title: str
    fixture: str  # the trained model with an intact head
    rule: str  # the rule that audit must report
    damage: Callable[[Path, Path], None]  # damage(base, model) writes the broken checkpoint
    fix: tuple[str, ...]  # commands
    symptom: str
    cause: str
    own: tuple[str, ...] = ()  # shared tensors that the engine of the story does not take from the trunk
    fixed: str = "model"  # the folder with the fixed checkpoint


def top_level_only(base: Path, model: Path) -> None:
    shutil.copytree(base, model)


def saved_by_transformers(base: Path, model: Path) -> None:
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(model)


def head_not_left_out(base: Path, model: Path) -> None:
    """Quantize the model to fp8, copy the head back in bf16, and do not list it as unquantized."""
    Model.load(base).save(model, fp8=True)
    old = {name: value for file in base.glob("*.safetensors") for name, value in load_file(file).items()}
    _rewrite(model, lambda name: name.endswith("_scale_inv"), lambda table, name: table.pop(name))
    _rewrite(model, lambda name: name in old, lambda table, name: table.update({name: old[name]}))


def gains_shifted(base: Path, model: Path) -> None:
    """Subtract 1 in the stored dtype, as tools do; `nextn convert` refuses where that loses bits."""
    shutil.copytree(base, model)
    stored = Inventory.of(Checkpoint.open(model)).stored
    norms = {name for canonical, name in stored.items() if is_norm_weight(canonical)}
    _rewrite(model, lambda name: name in norms, lambda table, name: table.update({name: table[name] - 1}))


def one_for_all(base: Path, model: Path) -> None:
    """Store MTP layer 1 with the values of layer 0."""
    shutil.copytree(base, model)
    _rewrite(
        model, lambda name: ".3." in name, lambda table, name: table.update({name: table[name.replace(".3.", ".2.")]})
    )


def _rewrite(
    model: Path, picked: Callable[[str], bool], change: Callable[[dict[str, torch.Tensor], str], object]
) -> None:
    """Apply `change` to the picked tensors of the head's file, and update the index."""
    stored = Inventory.of(Checkpoint.open(model))
    file = next(iter({stored.checkpoint.tensors[name].file for name in stored.stored.values()}))
    table = load_file(model / file)
    for name in [each for each in table if picked(each) and each in stored.stored.values()]:
        change(table, name)
    save_file({name: value.clone() for name, value in table.items()}, model / file, metadata={"format": "pt"})
    headers = {path.name: read_header(path).tensors for path in sorted(model.glob("*.safetensors"))}
    if (model / INDEX).exists():
        places = {name: file for file, header in headers.items() for name in header}
        write_index(model, places, sum(info.nbytes for header in headers.values() for info in header.values()))


STORIES = (
    Story(
        "embed_tokens and lm_head only at the top level (DeepSeek-V4)",
        "v4", "shared-missing", top_level_only, ("nextn restore model --add-aliases vllm",),
        "The checkpoint loads, the text is correct, acceptance is 0 % from the first request on.",
        "DeepSeek-V4 stores `embed.weight` and `head.weight` at the top level. A loader that looks for them inside the"
        " MTP layer, and does not share the trunk's with the draft model, leaves both uninitialized without an error"
        " ([vllm#43456](https://github.com/vllm-project/vllm/issues/43456)). `--add-aliases` writes the copies that"
        " such a loader finds.",
        own=("embedding", "output"),
    ),
    Story(
        "`save_pretrained` dropped the head",
        "qwen", "head-absent", saved_by_transformers, ("nextn restore model --from base",),
        "After a fine-tune the folder is slightly smaller than the base model's; engines crash, or draft noise.",
        "transformers' model classes contain only the trunk: the head's tensors are skipped on load and missing from"
        " the saved files, while config.json still declares them."
        " [`nextn.keep_head`](../reference/checkpoints.md#keeping-the-head) prevents this.",
    ),
    Story(
        "A quantized checkpoint whose config covers the head, too",
        "glm", "quantization", head_not_left_out, ("nextn restore model --from model --force",),
        "The quantized model answers well; with MTP on, nothing is accepted.",
        "The head was copied back in bf16, but the config's list of unquantized modules was not extended. An engine"
        " follows the config: it builds the head's layers for fp8 weights and scales, and has no parameters for the"
        " tensors in the file. `restore` with the model's own head adds it to the list.",
    ),
    Story(
        "Norm weights shifted by one",
        "qwen", "norm-weights-shifted", gains_shifted, ("nextn convert model fixed --norm-weights add-1",),
        "Shapes, names and dtypes are right, and acceptance is near zero.",
        "Qwen3-Next and 3.5 store `w` where the multiplier is `1 + w`. A converter from a format that stores the"
        " multiplier subtracted 1 from the weights of a head that were already stored as `w`. No loader can detect"
        " this; the audit compares the head's norm weights with the trunk's.",
        fixed="fixed",
    ),
    Story(
        "Several MTP layers loaded as one",
        "glm_two", "modules-identical", one_for_all, ("nextn restore model --from base --force",),
        "The first draft is accepted as often as before, the later ones hardly.",
        "The head has two MTP layers, and a converter that knows only one wrote it twice.",
    ),
)  # fmt: skip


def tell(story: Story, folder: Path) -> tuple[str, float, float]:
    """Run one story in `folder`; return its section of the page, and the acceptance before and after."""
    torch.set_num_threads(1)
    shutil.copytree(FIXTURES / story.fixture, folder / "base")
    story.damage(folder / "base", folder / "model")
    before = drafted(folder / "model", story.own)
    commands = ["nextn audit model", *story.fix, f"nextn audit {story.fixed}"]
    shell = "\n".join(f"$ {command}\n{run(command, folder)}" for command in commands)
    after = drafted(folder / story.fixed, story.own)
    text = f"""\
{fill(story.symptom, 120)}

{fill(story.cause, 120)}

```console
{shell}
```

Mean acceptance length at K = {K}, in an engine that leaves missing tensors uninitialized:
**{before.length:.2f}** before, **{after.length:.2f}** after.
Acceptance rate by depth: {_rates(before)} before, {_rates(after)} after.
"""
    return text, before.length, after.length


def _rates(figures: Acceptance) -> str:
    return ", ".join("-" if math.isnan(rate) else f"{rate:.2f}" for rate in figures.rates)


def run(command: str, folder: Path) -> str:
    """Return what a command prints in `folder`, on a terminal of 110 columns; exit code 1 (findings) is fine."""
    program, *words = command.split()
    assert program == "nextn"
    settings = os.environ | {"COLUMNS": "110", "TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "nextn", *words], cwd=folder, env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    lines = (done.stdout + done.stderr).replace(f"{folder}/", "").splitlines()
    return re.sub(r"\n{2,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip() + "\n"


def drafted(folder: Path, own: tuple[str, ...]) -> Acceptance:
    """Measure greedy acceptance at K = 4 in an engine that silently skips missing tensors."""
    model = as_engine(folder, own)
    prompts = [row.tolist() for row in refrain(32, 33, seed=10**6)]
    return Acceptance.of([*rounds(model.trunk, model.head, prompts, Settings(num_speculative_tokens=K, max_tokens=28))])


def as_engine(folder: Path, own: tuple[str, ...]) -> Model:
    """Load a model as such an engine does. own: shared tensors taken from the file's copy, or left uninitialized."""
    found = Inventory.of(Checkpoint.open(folder))
    with TensorReader(found) as weights:
        state, _ = trunk_state(weights)
        trunk = Trunk.from_pretrained(folder, state=state, stage=found.family.hidden, dtype=torch.float32)
        torch.manual_seed(0)
        head = Head(replace(found.family, own=(*found.family.own, *own)), trunk, num_modules=found.declared)
        beside = set(weights.scales.values())
        names = {each: name for each, name in found.stored.items() if name not in beside and has_place(found, name)}
        stored = {each: weights.read(name).float() for each, name in names.items()}
    wanted = head.state_dict()
    given = {f"stack.{name}": value for name, value in to_runtime_layout(head, stored).items()}
    head.load_state_dict(wanted | {name: value for name, value in given.items() if name in wanted})
    return Model(trunk, head, head.family)


def has_place(found: Inventory, name: str) -> bool:
    """Return whether an engine that follows the quantization config has a parameter for this tensor."""
    config, info = QuantConfig.of(found.checkpoint), found.checkpoint.info(name)
    plain = info.dtype in FLOATS and len(info.shape) > 1
    return not (plain and config is not None and config.covers(name.removesuffix(".weight")))


def page() -> str:
    sections, rows = [], []
    for number, story in enumerate(STORIES, 1):
        with tempfile.TemporaryDirectory() as folder:
            text, before, after = tell(story, Path(folder))
        sections.append(f"## {number}. {story.title}\n\n{text}")
        link = f"[{story.title}](#{anchor(f'{number}. {story.title}')})"
        rows.append(f"| {link} | `{story.rule}` | `{story.fix[0]}` | {before:.2f} | {after:.2f} |")
    return "\n".join([INTRO + "\n".join(rows) + "\n", *sections])


def anchor(title: str) -> str:
    """Return the anchor that GitHub makes of a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page())
