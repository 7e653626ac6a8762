"""Writes docs/troubleshooting.md: five heads that stopped drafting, each broken, audited, mended and measured for real.

The models are the trained ones under tests/fixtures, the commands are run as they are shown.
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
PAGE = HERE / "troubleshooting.md"
sys.path.insert(0, str(HERE.parent / "tests"))

from tiny import FIXTURES, refrain  # noqa: E402

from nextn.checkpoints.checkpoint import INDEX, Checkpoint, write_index  # noqa: E402
from nextn.checkpoints.inventory import Inventory  # noqa: E402
from nextn.checkpoints.quantisation import Quantisation  # noqa: E402
from nextn.checkpoints.tensor_file import read_header  # noqa: E402
from nextn.checkpoints.weights import FLOATS, Weights  # noqa: E402
from nextn.decode import Settings, rounds  # noqa: E402
from nextn.figures.acceptance import Acceptance  # noqa: E402
from nextn.filling import running_form, trunk_state  # noqa: E402
from nextn.head import Head  # noqa: E402
from nextn.model import Model  # noqa: E402
from nextn.moving.relayout import convert  # noqa: E402
from nextn.trunk import Trunk  # noqa: E402

DRAFTS = 4
INTRO = """\
# Troubleshooting: a head that does not draft

Text stays right whatever is wrong with an MTP head, because the trunk checks every draft. So a broken head shows as
speed that does not come, and no engine says why. `nextn audit MODEL` reads a checkpoint's headers and a few small
samples (of a hub id too: nothing is downloaded) and names the cause; `nextn restore` and `nextn convert` mend it.

Five causes, each on a small trained model that was broken on purpose. The commands are run as they stand here by
`make docs`; the last two columns are tokens per round at K = 4 before and after (1.00 = no draft is ever kept).

| Story | Rule | Mend | Before | After |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Story:
    """One broken head: `spoil(base, model)` writes the broken checkpoint, `base` has the head whole.

    fixture: the trained model that is the base. rule: what audit must say. own: shared tensors that the engine of the
    story does not take from the trunk. mend: the commands. mended: the folder that is whole then.
    """

    title: str
    fixture: str
    rule: str
    spoil: Callable[[Path, Path], None]
    mend: tuple[str, ...]
    symptom: str
    cause: str
    own: tuple[str, ...] = ()
    mended: str = "model"


def top_level_only(base: Path, model: Path) -> None:
    shutil.copytree(base, model)


def saved_by_transformers(base: Path, model: Path) -> None:
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(model)


def head_not_left_out(base: Path, model: Path) -> None:
    """The model quantised to fp8, the head copied back in bf16, the list of what is unquantised forgotten."""
    Model.load(base).save(model, fp8=True)
    old = {name: value for file in base.glob("*.safetensors") for name, value in load_file(file).items()}
    _rewrite(model, lambda name: name.endswith("_scale_inv"), lambda table, name: table.pop(name))
    _rewrite(model, lambda name: name in old, lambda table, name: table.update({name: old[name]}))


def gains_shifted(base: Path, model: Path) -> None:
    convert(base, model, gain="subtract-1")


def one_for_all(base: Path, model: Path) -> None:
    """Module 1 stored with the values of module 0."""
    shutil.copytree(base, model)
    _rewrite(
        model, lambda name: ".3." in name, lambda table, name: table.update({name: table[name.replace(".3.", ".2.")]})
    )


def _rewrite(
    model: Path, picked: Callable[[str], bool], change: Callable[[dict[str, torch.Tensor], str], object]
) -> None:
    """Apply `change` to the picked tensors of the head's file, and make the index agree."""
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
        "Embedding and output head at the top level only (DeepSeek-V4)",
        "v4", "shared-missing", top_level_only, ("nextn restore model --add-aliases vllm",),
        "The checkpoint loads, text is right, acceptance is 0 % from the first request on.",
        "DeepSeek-V4 keeps `embed.weight` and `head.weight` at the top level. A loader that looks for them inside the"
        " MTP module, and does not hand the trunk's to the draft, leaves both at initial values and says nothing"
        " ([vllm#43456](https://github.com/vllm-project/vllm/issues/43456)). `--add-aliases` writes the copies that"
        " such a loader finds.",
        own=("embedding", "output"),
    ),
    Story(
        "`save_pretrained` dropped the head",
        "qwen", "head-absent", saved_by_transformers, ("nextn restore model --from base",),
        "After a fine-tune the folder is a little smaller than the base model's; engines crash, or draft from noise.",
        "transformers' model classes hold the trunk alone: the head's tensors are skipped on load and missing from the"
        " save, while config.json goes on promising them. [`nextn.keep_head`](checkpoints.md#keeping-the-head) keeps it"
        " from happening.",
    ),
    Story(
        "A quantised checkpoint whose config claims the head, too",
        "glm", "quantisation", head_not_left_out, ("nextn restore model --from base --force",),
        "The quantised model answers well; with MTP on, nothing is accepted.",
        "The head was copied back in bf16, but the config's list of unquantised modules was not extended. An engine"
        " goes by the config: it builds the head's layers for fp8 weights and scales, and has no place for what the"
        " file holds. `restore` puts the bf16 head back and adds it to the list.",
    ),
    Story(
        "Norm gains shifted by one",
        "qwen", "gain-shifted", gains_shifted, ("nextn convert model mended --gain add-1",),
        "Shapes, names and dtypes are right, and acceptance is near zero.",
        "Qwen3-Next and 3.5 store `w` for a gain of `1 + w`. A converter from a format that stores the whole gain took"
        " the 1 off a head that never had it on. No loader can see it; the audit compares the head's gains with the"
        " trunk's.",
        mended="mended",
    ),
    Story(
        "Several modules loaded as one",
        "glm_two", "modules-identical", one_for_all, ("nextn restore model --from base --force",),
        "The first draft is kept as often as ever, the later ones hardly.",
        "The head has two modules, and a converter that knows one wrote it twice.",
    ),
)  # fmt: skip


def tell(story: Story, folder: Path) -> tuple[str, float, float]:
    """Run one story in `folder` -> its section of the page, and the acceptance length before and after."""
    torch.set_num_threads(1)
    shutil.copytree(FIXTURES / story.fixture, folder / "base")
    story.spoil(folder / "base", folder / "model")
    before = drafted(folder / "model", story.own)
    commands = ["nextn audit model", *story.mend, f"nextn audit {story.mended}"]
    shell = "\n".join(f"$ {command}\n{run(command, folder)}" for command in commands)
    after = drafted(folder / story.mended, story.own)
    text = f"""\
{fill(story.symptom, 120)}

{fill(story.cause, 120)}

```console
{shell}
```

Tokens per round at K = {DRAFTS}, by an engine that leaves at initial values what it does not find:
**{before.length:.2f}** before, **{after.length:.2f}** after.
Drafts kept, by depth: {_rates(before)} before, {_rates(after)} after.
"""
    return text, before.length, after.length


def _rates(figures: Acceptance) -> str:
    return ", ".join("-" if math.isnan(rate) else f"{rate:.2f}" for rate in figures.rates)


def run(command: str, folder: Path) -> str:
    """What a command prints in `folder`, in a terminal 110 columns wide; a verdict of findings is no failure."""
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
    """Acceptance at K = 4, greedy, of the head as an engine has it that skips in silence what it does not find."""
    model = as_engine(folder, own)
    prompts = [row.tolist() for row in refrain(32, 33, seed=10**6)]
    return Acceptance.of([*rounds(model.trunk, model.head, prompts, Settings(drafts=DRAFTS, max_tokens=28))])


def as_engine(folder: Path, own: tuple[str, ...]) -> Model:
    """own: embedding or output head of the module's own, from the file's copy or at an initial value."""
    found = Inventory.of(Checkpoint.open(folder))
    with Weights(found.checkpoint, found.family) as weights:
        state, _ = trunk_state(found, weights)
        trunk = Trunk.from_pretrained(folder, state=state, stage=found.family.hidden, dtype=torch.float32)
        torch.manual_seed(0)
        head = Head(replace(found.family, own=(*found.family.own, *own)), trunk, num_modules=found.promised)
        beside = set(weights.scales.values())
        names = {each: name for each, name in found.stored.items() if name not in beside and has_place(found, name)}
        stored = {each: weights.read(name).float() for each, name in names.items()}
    wanted = head.state_dict()
    given = {f"stack.{name}": value for name, value in running_form(head, stored).items()}
    head.load_state_dict(wanted | {name: value for name, value in given.items() if name in wanted})
    return Model(trunk, head, head.family)


def has_place(found: Inventory, name: str) -> bool:
    """Whether an engine that goes by the quantisation config has a parameter for this tensor."""
    config, info = Quantisation.of(found.checkpoint), found.checkpoint.info(name)
    plain = info.dtype in FLOATS and len(info.shape) > 1
    return not (plain and config is not None and config.covers(name.removesuffix(".weight")))


def page() -> str:
    sections, rows = [], []
    for number, story in enumerate(STORIES, 1):
        with tempfile.TemporaryDirectory() as folder:
            text, before, after = tell(story, Path(folder))
        sections.append(f"## {number}. {story.title}\n\n{text}")
        link = f"[{story.title}](#{anchor(f'{number}. {story.title}')})"
        rows.append(f"| {link} | `{story.rule}` | `{story.mend[0]}` | {before:.2f} | {after:.2f} |")
    return "\n".join([INTRO + "\n".join(rows) + "\n", *sections])


def anchor(title: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page())
