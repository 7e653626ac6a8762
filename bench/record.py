"""Records of benchmarks: figures with the day and the machine that they are from."""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch

from nextn.checkpoint.safetensors_file import write_json
from nextn.evaluate.decoding_costs import processor_name


def origin() -> dict[str, object]:
    """Return the day, the processor, and what else figures depend on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def write_record(out: Path | None, figures: Mapping[str, object]) -> None:
    """Write the figures with their origin, unless they name their own. None: write nothing."""
    if out is not None:
        write_json(out, {**origin(), **figures})
