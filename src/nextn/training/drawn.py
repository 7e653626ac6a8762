"""Whether texts are answers that the trunk itself drew: stored answers say so in their first line.

On such texts a draft is kept with chance min(1, q/p) of the text's own token; on others held-out figures use 1 - TV.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nextn.corpus.corpus_files import Source, header_of, sorted_out
from nextn.errors import ConfigError
from nextn.sampling import Sampling
from nextn.training.imprint import imprint
from nextn.trunk import Trunk
from nextn.words import changes


def are_drawn(
    sources: Sequence[Source], trunk: Trunk, temperature: float, *, said: bool = False, all_tokens: bool = False
) -> tuple[bool, list[str]]:
    """-> whether all that counts as a label in `sources` was drawn from the trunk at the temperature, and notes.

    said: the user's word for it, for sources without such a first line. all_tokens: prompts count, too, which nobody
    drew. Raises ConfigError where `said` is not what a file says of itself.
    """
    texts, others = sorted_out(sources)
    headers = {str(source): header_of(source) for source in others}
    known = {name: header for name, header in headers.items() if header is not None}
    this = imprint(trunk.model) if known else ""
    doubts = [f"{name}: {doubt}" for name, header in known.items() if (doubt := _doubt(header, this, temperature))]
    if said and all_tokens:
        raise ConfigError("--drawn and --all-tokens: prompts were not drawn from the trunk; leave one of them out")
    if said and doubts:
        raise ConfigError(
            f"--drawn: {doubts[0]}. Leave --drawn out: it is for files that do not say how they were made"
        )
    notes = [f"{doubt}; held-out figures of sampling use 1 - TV on it" for doubt in doubts]
    is_told = bool(known) and not texts and len(known) == len(headers)
    return not doubts and not all_tokens and (said or is_told), notes


def _doubt(header: Mapping[str, Any], trunk: str, temperature: float) -> str | None:
    """Why answers are not the trunk's at the temperature."""
    if header.get("trunk") != trunk:
        return "answers of another trunk, or of this one in another dtype; `nextn answer` makes this trunk's own"
    sampling = header.get("settings", {}).get("sampling", {})
    if sampling.get("temperature") == 0:
        return "greedy answers"
    if told := changes(sampling, asdict(Sampling(temperature))):
        return f"answers drawn with {told}; the settings' temperature is what the head is trained for"
    return None
