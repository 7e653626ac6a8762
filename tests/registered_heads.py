"""Architectures with a head or a draft model that vLLM, SGLang and transformers register, and what of them is covered.

`python tests/registered_heads.py --vllm DIR --sglang DIR` reads the folders `vllm` and `sglang` of their sources or
wheels, writes tests/registered_heads.json, and lists what no family row and no kind of draft model covers.
transformers is read where it is installed.
"""

import argparse
import ast
import json
import re
from importlib.util import find_spec
from pathlib import Path

from nextn.checkpoint.draft_models import standalone
from nextn.family_table import WITHHELD, Family, by_name, engine_versions, rows

RECORD = Path(__file__).with_suffix(".json")
_SGLANG_CLASS = re.compile(r"\w*(?:MTP|NextN|Eagle3?|DFlash|DSpark|Assistant)\w*")
# What transformers' classes skip or count of a head. `layers.<number>` of GLM's are the appended ones.
_SKIPPED = re.compile(r"_keys_to_ignore_on_load_unexpected = \[[^\]]*(?:mtp|nextn|layers\\\.\d)", re.I)
_COUNTED = re.compile(r"^\s+num_mtp_layers\s*[:=] ?(?!AttributeError)", re.M)

# Of the packages whose lines the rows cite, and what such a line says: a class, a pattern of names, a mapping.
VERSIONS = {engine: engine_versions.VERSIONS[engine] for engine in ("vllm", "sglang", "transformers")}
_SAYS = re.compile(r"mtp|nextn|multi_?token|eagle|assistant|_keys_to_ignore|^class |^\s*mapping|: \[$", re.I)

# Registered, and neither a row nor a kind of draft model: why.
LEFT_OUT = {
    "vllm": {
        "ExtractHiddenStatesModel": "writes hidden states, and drafts nothing",
        "ParseAuxMTPModel": "an encoder-decoder model of documents (Nemotron-Parse-3.5)",
        "Qwen3XPressModel": "a draft model of blocks, of which no checkpoint was seen",
    },
    "sglang": {
        "Qwen3MoeForCausalLMMTP": "no published checkpoint is known: Qwen3-MoE itself was published without a head",
    },
    "transformers": {
        "muse_glimmer_assistant": "a draft model of its own (DFlash)",
        "mistral_large4": "DSpark's stages, under mtp_dspark.",
        "olmo_hybrid": "the pattern is inherited: no release has a head",
    },
}  # fmt: skip


def of_vllm(root: Path) -> dict[str, str]:
    """Return draft architecture -> the module that has it, as vLLM's registry says."""
    tree = ast.parse((root / "model_executor" / "models" / "registry.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_SPECULATIVE_DECODING_MODELS":
            return {arch: module for arch, (module, _) in ast.literal_eval(node.value).items()}
    raise ValueError(f"{root}: no table of draft architectures")


def of_sglang(root: Path) -> dict[str, str]:
    """Return draft architecture -> the file in srt/models whose EntryClass it is."""
    found = {}
    for path in sorted((root / "srt" / "models").glob("*.py")):
        entry = re.search(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", path.read_text(), re.M)
        for name in re.findall(r"\w+", entry[1]) if entry else ():
            if _SGLANG_CLASS.fullmatch(name):
                found[name] = path.name
    return found


def of_transformers() -> dict[str, str]:
    """Return model folder -> what marks a head there, of the installed transformers."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    found = {}
    for path in sorted((Path(spec.origin).parent / "models").glob("*/*.py")):
        text = path.read_text()
        if path.name.startswith("modeling_") and (match := _SKIPPED.search(text)):
            found[path.parent.name] = match[0]
        elif path.name.startswith("configuration_") and (match := _COUNTED.search(text)):
            found.setdefault(path.parent.name, match[0].strip())
    return found | {folder.name: "a draft model" for folder in Path(spec.origin).parent.glob("models/*_assistant")}


def uncovered(engine: str, registered: dict[str, str]) -> list[str]:
    """Return what is registered and neither covered nor left out on purpose."""
    return sorted(
        name
        for name, where in registered.items()
        if name not in LEFT_OUT[engine] and not _is_covered(engine, name, where)
    )


def misplaced(engine: str, root: Path) -> list[str]:
    """Return the cited lines of an engine's source, in the folder of its package, that say nothing of a head."""
    found = []
    for source in {text for row in _all_rows() for text in (row.engines[engine].source, *row.sources)}:
        if match := re.search(rf"/blob/v{VERSIONS[engine]}/(?:src/|python/)?{engine}/(.+)#L(\d+)$", source):
            lines = (root / match[1]).read_text().splitlines()
            if not _SAYS.search("".join(lines[int(match[2]) - 1 : int(match[2])])):
                found.append(source)
    return sorted(found)


def _all_rows() -> list[Family]:
    return [*rows(), by_name("gemma4_assistant")]


def _is_covered(engine: str, name: str, where: str) -> bool:
    if engine == "transformers":
        types = {kind for row in _all_rows() for kind in (*row.model_types, *row.draft_types)}
        types |= {kind for each in WITHHELD for kind in each.model_types}
        sources = [row.engines[engine].source for row in _all_rows()]
        known = any(kind == name or kind.startswith(f"{name}_") for kind in types)
        return known or any(f"/models/{name}/" in source for source in sources)
    if standalone({"architectures": [name]}) is not None:
        return True
    path = f"/{where.replace('.', '/')}/" if where.startswith("vllm.") else f"/{where.removesuffix('.py')}.py"
    cited = [text for row in _all_rows() for text in (row.engines[engine].source, *row.sources)]
    return any(path in text for text in cited)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--sglang", type=Path, required=True)
    parser.add_argument("--versions", nargs=2, required=True, help="of vLLM and of SGLang")
    given = parser.parse_args()
    record = {
        "vllm": {"version": given.versions[0], "architectures": of_vllm(given.vllm)},
        "sglang": {"version": given.versions[1], "architectures": of_sglang(given.sglang)},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for engine, table in record.items():
        print(engine, table["version"], *uncovered(engine, table["architectures"]))
        print(engine, "cited lines without a head:", *misplaced(engine, getattr(given, engine)))
    print("transformers", *uncovered("transformers", of_transformers()))


if __name__ == "__main__":
    main()
