"""The exception tree. A message says what, the value, what would be valid and what to do; `cli` exits with its code.

NextnError
├── ConfigError       a setting, flag or input that cannot be used            exit 2
├── FamilyError       a family that is unknown, or a trunk without one        exit 2
├── CheckpointError   files that are absent, damaged, incomplete or foreign   exit 2
├── RollbackError     a cache that cannot be put back exactly                 exit 2
├── EngineError       a served engine that is absent, slow, or says no        exit 2
│   └── BudgetError   the requests or seconds allowed are used up             exit 2
└── TrainingError     a run that cannot go on (non-finite loss, ...)          exit 1
"""


class NextnError(Exception):
    """Base of every error that a user can cause; never a bug of ours."""

    exit_code = 2


class ConfigError(NextnError):
    """A setting, flag or input has a value that cannot be used."""


class FamilyError(NextnError):
    """No family row fits, or the family cannot do what was asked."""


class CheckpointError(NextnError):
    """A checkpoint is absent, damaged, incomplete, or belongs to another model."""


class RollbackError(NextnError):
    """A cache holds state that cannot be put back exactly."""


class EngineError(NextnError):
    """A served engine does not answer, says no, or answers what cannot be read. status: its HTTP status, if any."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BudgetError(EngineError):
    """The requests or seconds allowed are used up; what was found so far stands."""


class TrainingError(NextnError):
    """A training run cannot go on; what was saved before stays valid."""

    exit_code = 1


def need_whole(settings: object, **least: int) -> None:
    """Raise ConfigError for the first of these fields that is smaller than its least value."""
    for name, low in least.items():
        value = getattr(settings, name)
        if value < low:
            raise ConfigError(f"{name} = {value}; expected a whole number >= {low}")
