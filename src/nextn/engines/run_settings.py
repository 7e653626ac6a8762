"""Settings of an engine that its log, its command line or its environment show: version, K, and forced acceptance.

Benchmarks force acceptance so that engines can be compared at one length: drafts are then accepted unseen. Other
settings relax the rule: drafts are accepted that the trunk did not sample. In both cases the text is not the trunk's,
and the counts say nothing about the head. Nor do those of another drafter.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from io import StringIO
from itertools import islice

from nextn.engines.counters import ADAPTIVE, MAX_POSITIONS, Counters
from nextn.engines.log_reader import read_log

# NAME=1, name: 1, "name": 1, --name 1, ["--name", "1"], and in YAML `- --name` or `- name: NAME` above the value.
_ASSIGN = r"(?:['\"\\]*(?:\s*+[:=]\s*+|\s++)|['\"]\s*+,\s*+)(?:-\s++|value:\s*+)?['\"\\]*"
_NUMBER = r"(-?[0-9]{1,9}(?:\.[0-9]{1,9})?)"
_MAX_TEXT = 1024 * 1024
_MAX_QUOTE = 240  # characters of a line
_MAX_FAULTS = 1000  # lines to look at


@dataclass(frozen=True)
class Override:
    """A setting by which acceptance is not decided by comparing drafts with the trunk's distribution."""

    name: str  # as people write it
    engine: str
    pattern: str  # its last group is the value, or where there is none the name
    # forced: drafts are accepted unseen; relaxed: others than the trunk's tokens are accepted; another drafter's: the
    # drafts are not the MTP head's.
    effect: str
    off: tuple[float, ...] = ()  # values that turn it off
    off_from: float | None = None  # and those from here on


def _named(name: str, value: str = _NUMBER) -> str:
    """The name with - or _, on a command line, in JSON, YAML, a Python repr or an environment."""
    words = "[-_]".join(map(re.escape, re.split("[-_]", name)))
    return rf"(?<![\w-])(?:--)?{words}{_ASSIGN}{value}"


def _option(name: str) -> str:
    """The option on a command line, or as an argument in a Python repr or YAML; in JSON a quote follows the name."""
    return rf"(?<![\w-])(?:--{name}{_ASSIGN}|{name.replace('-', '_')}(?:=|: ?)){_NUMBER}"


# A whole name that says so, with a value or as an option without one; `no-relaxed-acceptance` turns it off, and
# `typical_acceptance_rate` is a result. A longer word is no name.
_NAME = r"[a-z0-9_-]"
_PART = r"(?<![a-z0-9])(?:{})(?![a-z0-9])"
_RELAXES = _PART.format("relax(?:ed|ation)|typical|optimistic|lossy|entropy[-_]verify")
_RELAXES_NOT = _PART.format("no|non|not|off|disabled?|without|skip|rates?|ratios?|len|lengths?")
_OFF = rf"{_ASSIGN}(?:false|off|none|disabled)\b"
_RELAXED = (
    rf"(?i)(?<![\w-])(--)?(?={_NAME}{{1,120}}+(?![\w-]))(?={_NAME}*(?:accept|mtp|spec|thinking|verify|threshold))"
    rf"(?={_NAME}*{_RELAXES})(?!{_NAME}*{_RELAXES_NOT})(?P<name>[a-z0-9]{_NAME}*+)"
    rf"(?:{_ASSIGN}(true\b|(?:on|yes|enabled)\b(?!-|[ \t]+\w)|[0-9][0-9.]{{0,20}})"
    rf"|(?(1)(?!{_OFF})(?=['\"]?[ \t,\]\\]*(?:\n|\Z|(?<=[ \t,])['\"]?--?[a-z]))|(?!)))"
)
# A name of such a rule that begins by turning it off, which is false: engines with such an option relax by default.
_NOT_OFF = (
    rf"(?i)(?<![\w-])(?:--)?(?P<name>(?:disable|no)[-_](?={_NAME}{{1,120}}+(?![\w-]))"
    rf"(?={_NAME}*(?:accept|mtp|spec|thinking|verify|threshold))(?={_NAME}*{_RELAXES}){_NAME}*+){_ASSIGN}(false)\b"
)
_OTHERS = "another drafter's"
OVERRIDES: tuple[Override, ...] = (
    Override("method", "vLLM",
             _named("method", r"(eagle3?|medusa|mlp_speculator|ngram\w*|suffix|draft_model|dflash|dspark)\b"), _OTHERS),
    Override("--speculative-algorithm", "SGLang",
             _named("speculative_algorithm", r"(EAGLE3|NGRAM|SUFFIX|STANDALONE|DFLASH|DSPARK)\b"), _OTHERS),
    Override("--spec-type", "llama.cpp", _named("spec_type", r"((?:draft|ngram)-(?:(?!mtp)[\w,-])+)(?![\w,-])"),
             _OTHERS),
    Override("statistics", "llama.cpp",
             r"(?s)\A(?!.*statistics\s+(?:draft-)?mtp).*?statistics\s+((?:draft|ngram)-[a-z0-9-]+):", _OTHERS),
    Override("drafter", "any engine, by the label of a line",
             r"(?i)(?<![a-z0-9-])(eagle-?3|medusa|dflash2?|dspark)(?:\]|: )", _OTHERS),
    Override("synthetic_acceptance_length", "vLLM", _named("synthetic_acceptance_length"), "forced"),
    Override("synthetic_acceptance_rates", "vLLM", _named("synthetic_acceptance_rates", r"(\[[^\]\n]{1,400}\])"),
             "forced"),
    Override("rejection_sample_method=synthetic", "vLLM", _named("rejection_sample_method", r"(synthetic)"), "forced"),
    Override("--spec-synth-len, --spec-synth-rates", "llama.cpp",
             rf"(?i)(?:spec[-_]synth[-_](?:len|rates){_ASSIGN}|synthetic acceptance: [^\n]{{0,40}} mean length = )"
             r"([0-9.]{1,20}(?:,[0-9.]{1,20}){0,64})", "forced"),
    Override("SGLANG_SIMULATE_ACC_LEN", "SGLang", _named("SGLANG_SIMULATE_ACC_LEN"), "forced", off=(0, -1)),
    Override("SIMULATE_ACC_LEN", "SGLang", _named("SIMULATE_ACC_LEN"), "forced", off=(0, -1)),
    Override("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "TensorRT-LLM",
             _named("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"), "forced", off=(0,)),
    # Without the dashes these are results, in the JSON of vLLM's and SGLang's benchmarks.
    Override("--spec-decode-acceptance-length", "ATOM", _option("spec-decode-acceptance-length"), "forced"),
    Override("--spec-decode-acceptance-rate", "ATOM", _option("spec-decode-acceptance-rate"), "forced"),
    Override("accept_policy", "FastDeploy", _named("accept_policy", "(accept_all|reject_all)"), "forced"),
    Override("relaxed, typical, lossy, optimistic, entropy_verify", "any engine, by its name", _RELAXED,
             "relaxed", off=(0,)),
    Override("disable_...", "any engine, by its name", _NOT_OFF, "relaxed"),
    # vLLM-Ascend logs it with its default, which its entropy_verify turns on.
    Override("posterior_threshold", "TensorRT-LLM, vLLM before 0.8",
             rf"(?<!entropy_verify=False, ){_named('posterior_threshold')}", "relaxed"),
    Override("typical_acceptance_sampler", "vLLM before 0.8",
             _named("spec_decoding_acceptance_method", r"(typical_acceptance_sampler)"), "relaxed"),
    Override("--speculative-accept-threshold-single", "SGLang", _named("speculative_accept_threshold_single"),
             "relaxed", off_from=1.0),
    Override("--speculative-accept-threshold-acc", "SGLang", _named("speculative_accept_threshold_acc"), "relaxed",
             off_from=1.0),
    Override("--cascade-threshold", "MTPLX", _named("cascade_threshold"), "relaxed", off=(0,)),
    Override("--draft-p-accept", "forks of llama.cpp", _named("draft_p_accept"), "relaxed", off=(0,), off_from=1.0),
)  # fmt: skip

# What engines say of weights that they miss: of tensors by name, or in a line that names the head.
_NOT_LOADED = re.compile(
    r"(?P<tensor>KeyError: '[\w.]{1,200}weight|Parameter [\w.]{1,200} not found in params_dict)|"
    r"(?i:weights? (?:are |were )?(?:missing|not (?:initialized|loaded|found))|no mtp weights|n't contain MTP|"
    r"\b(?:(?:weight|head|layer)s?\b[^\n;.]{0,80}|(?:mtp|nextn|drafter|draft model) (?:is |was )?)\bnot loaded\b|"
    r"ships? no (?:[\w*-]+(?:\.[\w*-]+)* ){0,4}(?:weight|head|layer)|"
    r"\bneither mtp\b[^\n]{0,40} tensors|load_model: not loaded|"
    r"failed to (?:create|load|init)|not started with|in load_weights|KeyError)"
)
_OF_HEAD = re.compile(r"(?i)(?<![a-z])(?:mtp|nextn|drafter|draft model|[eh]norm|eh_proj|shared_head|pre_fc_norm)")
# And where no model came up at all: loaders without its MTP layer look for a trunk layer's tensors in it.
_NO_MODEL = re.compile(
    r"(?i)missing tensor '[^'\n]{1,200}'|tensor '[^'\n]{1,200}' not found|tensor not found: \S{1,200}|"
    r"wrong number of tensors; expected|layer [0-9]{1,4} missing \S{1,100} projections|KeyError: '[\w.]{1,200}weight'|"
    r"tensor \S{1,200} has type \w{1,20}, expected|can not map tensor"
)
NOT_LOADED_FIX = "`nextn audit MODEL` names what the checkpoint lacks, and what the engine does with it"
# Settings by which rounds draft fewer tokens than K, by how likely the drafts are or were.
_ADAPTIVE = re.compile(r"(?<![\w-])--(?:speculative-adaptive(?![\w-])|spec-draft-adaptive\S*)|draft-mtp-adaptive")
_RAY = re.compile(r"\[repeated ([0-9]{1,6})x across cluster\]")
# Several drafters, of which the head is one: only `statistics draft-mtp` counts the head's drafts alone.
_MIXED = re.compile(_named("spec_type", r"((?=[\w,-]*draft-mtp)[\w-]+(?:,[\w-]+)+)"))
_COPIES_AMONG = re.compile(
    r"(?i)(?<![a-z])(?:prompt[ -]?lookup|n-?gram|suffix|pld)[: ]{1,2}draft\w{0,2} (?:in|on) [1-9][0-9,]{0,12} "
    r"(?:of|/) [0-9,]{1,13}"
)
# K as its users write it; those of SGLang and mlx-vlm count the bonus token or the block.
_DEPTHS = (
    (_named("num_speculative_tokens", r"([0-9]{1,3})\b"), 0),
    (_named("num_spec_tokens", r"([0-9]{1,3})\b"), 0),
    (_named("speculative_num_steps", r"([0-9]{1,3})\b"), 0),
    (_named("spec_draft_n_max", r"([0-9]{1,3})\b"), 0),
    (_named("draft_max", r"([0-9]{1,3})\b"), 0),
    (_named("max_draft_len", r"([0-9]{1,3})\b"), 0),
    (_named("num_nextn_predict_layers", r"([0-9]{1,3})\b"), 0),
    (r"(?s:\blmdeploy\b.{0,2000}?)" + _named("speculative_num_draft_tokens", r"([0-9]{1,3})\b"), 0),
    (_named("speculative_num_draft_tokens", r"([0-9]{1,3})\b"), 1),
    (_named("draft_block_size", r"([0-9]{1,3})\b"), 1),
)
# A bare `version: ` is llama.cpp's; with a name before it, it is of one of the packages that vLLM's collect_env lists.
_VERSION = re.compile(
    r"(?:Initializing an? (?:V[01] )?LLM engine \(v|vLLM (?:API server )?[Vv]ersion:? v?|vllm[=/ ]+v?|sglang[=/ ]+v?"
    r"|SGLang version:? v?|TensorRT[- ]LLM version:? v?|(?:(?m:^)|[:|]) {0,9}version: |build_info: |build: )"
    r"(?P<version>b?[0-9]++(?![a-z])[\w.+-]{0,39}(?: \([0-9a-f]{6,12}\))?)"
)


def overrides_in(text: str) -> tuple[str, ...]:
    """Return the settings in a text that force or relax acceptance, as `name=value (engine, effect)`."""
    found = []
    for override in OVERRIDES:
        for match in re.finditer(override.pattern, text[:_MAX_TEXT]):
            given = match[match.lastindex or 0]
            if not _is_off(override, given):
                name = match.groupdict().get("name", override.name)
                value = f" = {given}" if "=" not in name and given != name else ""
                found.append(f"{name}{value} ({override.engine}: acceptance is {override.effect})")
                break
    return tuple(found)


def _is_off(override: Override, value: str) -> bool:
    if not re.fullmatch(_NUMBER, value):
        return False
    number = float(value)
    return number in override.off or (override.off_from is not None and number >= override.off_from)


def head_not_loaded(text: str) -> str:
    """Return a line of a log in which the engine says that it did not load the head, or not all of it; "" for none."""
    faults = list(islice(_NOT_LOADED.finditer(text, 0, _MAX_TEXT), _MAX_FAULTS))
    tensors = [match["tensor"] or "" for match in faults]
    # Loaders of heads count layers from 0, often without the head's name; a trunk lacks tensors of other layers, too.
    first = any(".0." in name for name in tensors) and not any(re.search(r"layers\.[1-9]", name) for name in tensors)
    for match in faults:
        begin = max(text.rfind("\n", 0, match.start()) + 1, match.start() - _MAX_QUOTE)
        line = text[begin : match.end() + _MAX_QUOTE].partition("\n")[0]
        if _OF_HEAD.search(line) or (first and match["tensor"]):
            return " ".join(line.split())[:_MAX_QUOTE]
    return ""


def model_not_loaded(text: str) -> str:
    """Return what an engine says of a tensor for which it did not load a model; "" for nothing."""
    match = _NO_MODEL.search(text, 0, _MAX_TEXT)
    return "" if match is None else match[0]


def with_settings(counters: Counters, texts: Iterable[str]) -> Counters:
    """Add what an engine's log or flags say: its version, K where no counts show it, and forced acceptance."""
    for text in texts:
        version = counters.version or _version(text)
        k, depths = counters.k, list[int]()
        if k is None and not counters.per_position and not counters.per_position_offered:
            depths = _depths(text)
            k = depths[0] if len(depths) == 1 else None
        overrides = tuple(dict.fromkeys((*counters.overrides, *overrides_in(text))))
        notes = counters.notes + ((ADAPTIVE,) if _ADAPTIVE.search(text, 0, _MAX_TEXT) else ())
        if len(depths) > 1:
            notes += (f"K is set to {' and '.join(map(str, depths[:9]))} in it; of several runs, give one alone",)
        mixed = _MIXED.search(text, 0, _MAX_TEXT)
        if mixed and counters.engine == "llama.cpp" and not counters.source.endswith("draft statistics"):
            notes += (
                f"the counts are of all drafters of --spec-type {mixed[1]}; `statistics draft-mtp` has the head's",
            )
        if copies := _COPIES_AMONG.search(text, 0, _MAX_TEXT):
            notes += (f"the counts may be of copied drafts, too ({copies[0]!r}); give those of a run with MTP alone",)
        if left_out := _left_out(text):
            notes += (f"Ray left {left_out} similar lines out, and their counts; RAY_DEDUP_LOGS=0 keeps them",)
        if line := head_not_loaded(text):
            notes += (f"the engine says that it did not load all of the head ({line!r}): {NOT_LOADED_FIX}",)
        counters = replace(counters, version=version, k=k, overrides=overrides, notes=tuple(dict.fromkeys(notes)))
    return counters


def _left_out(text: str) -> int:
    """Return how many lines with counts Ray left out, as it says behind one like them."""
    found = ((line, _RAY.search(line)) for line in text[:_MAX_TEXT].splitlines())
    return sum(int(match[1]) for line, match in found if match and read_log(StringIO(line)).counters)


def _version(text: str) -> str:
    match = _VERSION.search(text, 0, _MAX_TEXT)
    return "" if match is None else match["version"]


def _depths(text: str) -> list[int]:
    """Return the values of K that a text sets, by the first name that it has of those of K."""
    for pattern, extra in _DEPTHS:
        values = [int(match[1]) - extra for match in re.finditer(pattern, text[:_MAX_TEXT])]
        if found := [*dict.fromkeys(value for value in values if 0 < value <= MAX_POSITIONS)]:
            return found
    return []
