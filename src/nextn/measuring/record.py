"""What stands beside the figures in a record: what each number is, and hashes of what was measured."""

import hashlib
import json
from collections.abc import Sequence

from nextn.checkpoints.checkpoint import Checkpoint
from nextn.checkpoints.inventory import Inventory
from nextn.checkpoints.provenance import head_fingerprint, trunk_fingerprint
from nextn.checkpoints.snapshot import on_disk
from nextn.corpus.loops import TELLING
from nextn.figures.acceptance import DEFINITION
from nextn.figures.estimate import INTERVAL
from nextn.measuring.columns import RULES

DEFINITIONS = {
    "acceptance": DEFINITION.partition(";")[0] + "; rounds follow each other through the text as in decoding at this K",
    "length": "AL@K = 1 + sum over k <= K of a_1 ... a_k: tokens per round of K drafts, the trunk's own included",
    "interval_95": INTERVAL,
    "rule": RULES,
    "pass": "parallel: every column of a text at once; stepped: one by one through the head's caches; decoder: counted "
    "while decoding. The first two take the law of what is kept, given the text, so no draft is drawn",
    "decoder": "what was counted while the texts were decoded; temperature 0 by rule greedy, else by block. Wilson "
    "intervals that take rounds as independent",
    "columns": "a_1 over all columns alike, to compare the controls with",
    "shifted": "depth 1's argmax against the token after the one that it predicts",
    "shuffled": "a_1 over all columns, with each text's hidden states in random order",
    "chance": "argmax and token by accident: the sum over the vocabulary of the products of their frequencies",
    "median_rank": "how many tokens depth 1 likes better than the text's, in the median; vocab_size tokens in all",
    "looping": "texts that are loops (loops.degeneracy): left out, unless all are",
    "short": f"texts of fewer than {TELLING} tokens, in which loops cannot be told for sure",
    "hashes": "head: SHA-256 of its own tensors; trunk: of samples; prompts: of their token ids as JSON",
}


def hashes(source: str) -> dict[str, str]:
    """Fingerprints of the head and the trunk of a checkpoint: what the figures are of."""
    inventory = on_disk(Inventory.of(Checkpoint.open(source)))
    return {"head": head_fingerprint(inventory), "trunk": trunk_fingerprint(inventory)}


def prompts_hash(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of the token ids: whether two measurements asked the same."""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()
