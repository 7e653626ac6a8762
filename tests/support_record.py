"""What tests ran, for docs/reference/support.md: NEXTN_SUPPORT names the JSON file that they add it to."""

import json
import os
from pathlib import Path


def record(kind: str, family: str, value: object) -> None:
    """Note a result under its kind and family, if that is asked for."""
    name = os.environ.get("NEXTN_SUPPORT")
    if not name:
        return
    path = Path(name)
    found = json.loads(path.read_text()) if path.exists() else {}
    found.setdefault(kind, {})[family] = value
    path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
