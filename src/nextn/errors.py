"""The exception tree. A message names the value, what is valid and what to do; `cli` exits with the exit code.

NextnError
├── ConfigError       a setting, flag or input that cannot be used            exit 2
├── FamilyError       a family that is unknown, or a trunk without one        exit 2
├── CheckpointError   files missing, damaged, incomplete, of another model    exit 2
├── RollbackError     a cache that cannot be rolled back exactly              exit 2
├── EngineError       an engine that is unreachable, slow, or refuses         exit 2
│   └── BudgetError   the requests or seconds allowed are used up             exit 2
├── QueueFullError    the server's queue has no room for a request            exit 2
└── TrainingError     a run that cannot continue (non-finite loss, ...)       exit 1
"""


class NextnError(Exception):
    """Base of every error that a user can cause, with a message that names the value, what is valid and what to do.

    Example:
        >>> try:
        ...     nextn.load("no/such/folder")
        ... except nextn.NextnError as error:
        ...     print(type(error).__name__)
        CheckpointError
    """

    exit_code = 2


class ConfigError(NextnError):
    """A setting, flag or input has a value that cannot be used."""


class FamilyError(NextnError):
    """No family matches, or the family does not support the operation."""


class CheckpointError(NextnError):
    """A checkpoint is missing, damaged, incomplete, or belongs to another model."""


class RollbackError(NextnError):
    """A cache holds state that cannot be rolled back exactly."""


class EngineError(NextnError):
    """An engine does not answer, refuses, or sends an invalid answer. `status` is the HTTP status, if any."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class BudgetError(EngineError):
    """The requests or seconds allowed are used up; results so far remain valid."""


class QueueFullError(NextnError):
    """The server's queue has no room for another request; a client may try again later."""


class TrainingError(NextnError):
    """A training run cannot continue; what was saved before remains valid."""

    exit_code = 1


def require_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise ConfigError for an argument of another type."""
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} is {type(value).__name__} {value!r:.60}; expected {expected}")


def require(settings: object, **rules: tuple[bool, str]) -> None:
    """Raise ConfigError for the first field of `settings` that is not valid.

    Args:
        settings: The object that has the fields.
        rules: Name of a field -> whether its value is valid, and what would be.
    """
    for name, (is_valid, expected) in rules.items():
        if not is_valid:
            raise ConfigError(f"{name} = {getattr(settings, name)!r:.80}; expected {expected}")


def require_at_least(settings: object, most: int = 2**31 - 1, **least: int) -> None:
    """Raise ConfigError for the first of these fields that is below its least value, or above `most`."""
    for name, low in least.items():
        value = getattr(settings, name)
        require_type(name, value, (int, float), f"a number >= {low}")
        if not low <= value <= most:
            raise ConfigError(f"{name} = {value!s:.40}; expected a whole number >= {low}, at most {most}")
