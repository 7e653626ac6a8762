"""How a body is read: what happens to null, to unknown fields and to values that are not valid.

A field that is not known is refused where ignoring it could change the answer. Fields that never change an answer are
ignored, and so is what clients add to the messages of earlier answers; an answer's header names what was ignored.
Fields that this server does not support are accepted with the value that turns them off.
"""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails

from nextn.bounded_json import short_repr
from nextn.serve.api_errors import ApiError

# Fields of OpenAI's API and of vLLM's and llama.cpp's additions that do not change what is generated. Those of samplers
# say nothing while the sampler is off, see `OFF`.
IGNORED = frozenset(
    (
        "cache_prompt", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers",
        "dynatemp_exponent", "id_slot", "metadata", "mirostat_eta", "mirostat_tau", "prediction", "priority",
        "prompt_cache_key", "prompt_cache_retention", "request_id", "return_progress", "safety_identifier",
        "service_tier", "spaces_between_special_tokens", "store", "timings_per_token", "user", "verbosity",
        "xtc_threshold",
    )
)  # fmt: skip
# Fields that are not supported, with the value that turns them off.
OFF: Mapping[str, object] = {
    "allowed_token_ids": [], "bad_words": [], "best_of": 1, "dry_multiplier": 0, "dynatemp_range": 0, "echo": False,
    "function_call": "none", "include_reasoning": True, "include_stop_str_in_output": False, "length_penalty": 1,
    "mirostat": 0, "modalities": ["text"], "n_probs": 0, "prompt_logprobs": 0, "reasoning_effort": "none",
    "suffix": "", "truncate_prompt_tokens": 0, "typical_p": 1, "use_beam_search": False, "xtc_probability": 0,
}  # fmt: skip

M = TypeVar("M", bound="RequestModel")
T = TypeVar("T")
# Lists stop at their first error: a body can hold a million, and to describe each of them takes seconds.
ListOf = Annotated[list[T], Field(fail_fast=True)]
_MAX_IGNORED = 32  # names of ignored fields in a header
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RequestModel(BaseModel):
    """A JSON object of a request. `null` means that the field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    path: ClassVar[str | None] = None  # where unknown fields are ignored: what they are named after; None: refused
    meaningful: ClassVar[frozenset[str]] = frozenset()  # unknown fields that are refused all the same
    ignored: ClassVar[frozenset[str]] = frozenset()  # fields of a body beside IGNORED

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: object, info: ValidationInfo) -> object:
        """Drop null and what is ignored, and all but the first unknown field, which is one error enough."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name, value in data.items() if value is not None and name not in known]
        refused = next((name for name in unknown if cls.path is None or name in cls.meaningful), None)
        if cls.path is not None and info.context is not None:
            info.context.update(f"{cls.path}.{name}" for name in unknown[:_MAX_IGNORED])
        return {name: value for name, value in data.items() if value is not None and (name in known or name == refused)}


def parse_request(model: type[M], document: object, ignored: set[str] | None = None) -> M:
    """Check a JSON document, and note what is ignored; raise ApiError for the first value that is not valid."""
    ignored = set() if ignored is None else ignored
    if not isinstance(document, dict):
        raise ApiError(400, f"the body is {short_repr(document)}; expected a JSON object", code="invalid_type")
    fields: dict[str, object] = {}
    for name, value in document.items():
        if value is None or name in model.model_fields:
            fields[name] = value
            continue
        if name in IGNORED or name in model.ignored or value in ("", [], {}):
            ignored.add(name)
            continue
        if name in OFF:
            if value != OFF[name]:
                message = f"{name} is not supported; leave it out, or send {short_repr(OFF[name])}"
                raise ApiError(400, message, name, "unsupported_parameter")
            continue
        fields[name] = value
    try:
        return model.model_validate(fields, context=ignored)
    except ValidationError as error:
        raise _from_validation(error, fields) from error


def _fit(error: ErrorDetails) -> tuple[int, int, bool]:
    """Of a union, the deepest error is that of the alternative that fits best, whose `type` is valid.

    What is missing or unknown may follow from a value, or from another alternative.
    """
    rank = {"missing": 0, "extra_forbidden": 1}.get(error["type"], 2)
    return len(error["loc"]), rank, error["type"] != "literal_error" or error["loc"][-1] != "type"


_CODES = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}


def _from_validation(error: ValidationError, document: Mapping[str, object]) -> ApiError:
    errors = error.errors(include_url=False, include_context=False)
    worst = max(errors, key=_fit)
    kind, message = worst["type"], worst["msg"].removeprefix("Value error, ")
    path = _path(document, worst["loc"], missing=kind == "missing")
    if kind == "value_error" and ": " in message:
        field, _, message = message.partition(": ")
        path = f"{path}.{field}" if path else field
    code = _CODES.get(kind, "invalid_value" if kind == "value_error" else "invalid_type")
    if kind == "extra_forbidden":
        message = "unknown field; remove it, as it may change the answer"
    shown = "" if kind in ("missing", "extra_forbidden", "value_error") else f"; got {short_repr(worst['input'])}"
    return ApiError(400, f"{path or 'body'}: {message}{shown}", path or None, code)


def _path(document: object, loc: tuple[int | str, ...], *, missing: bool) -> str:
    """Return a location as `messages[0].content`, without the names that pydantic gives to alternatives of a union."""
    path = ""
    for index, step in enumerate(loc):
        if isinstance(step, int) and isinstance(document, list) and step < len(document):
            path, document = f"{path}[{step}]", document[step]
        elif isinstance(document, Mapping) and (step in document or (missing and index == len(loc) - 1)):
            path, document = f"{path}.{step}" if path else str(step)[:100], document.get(step)
    return path


def ignored_header(ignored: set[str]) -> str:
    """Return the names of ignored fields for a header; empty if there are none."""
    plain = sorted(name for name in ignored if _PLAIN_NAME.fullmatch(name))
    others = len(ignored) - len(plain[:_MAX_IGNORED])
    return ", ".join([*plain[:_MAX_IGNORED], *([f"{others} others"] if others else [])])
