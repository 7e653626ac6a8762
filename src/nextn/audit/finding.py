"""What a rule says: one finding each, with place, fact, what is valid and the command that mends it."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """error: the head will not work, in some engine at least. warning: it may not. note: worth knowing, no fault.

    rule: its id, such as `head-absent`. place: file, tensor or config field. found, valid: sentences. mend: one command
    and nothing else, or sentences with commands in backticks.
    """

    rule: str
    severity: Severity
    place: str
    found: str
    valid: str
    mend: str
