"""`verify`: is a served model's output the same with MTP on and off? Checks over live endpoints; imports no torch.

A check is a function from a `Session` to a `Check`; the checks know nothing of each other.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from nextn.benchmarking.workload import Prompt
from nextn.engines.endpoint import Endpoint, is_refusal
from nextn.errors import BudgetError, ConfigError, EngineError
from nextn.verify import context, exact, forms, sampled, told
from nextn.verify.check import Check, Outcome, Session, Settings

__all__ = ["CHECKS", "Check", "Outcome", "Report", "Session", "Settings", "verify"]

# Cheap and telling ones first: a run that is cut short has said most.
CHECKS: dict[str, Callable[[Session], Check]] = {
    "greedy": exact.greedy,
    "replay": exact.replay,
    "logprobs": told.logprobs,
    "max-tokens": forms.max_tokens,
    "stop-strings": forms.stop_strings,
    "streaming": exact.streaming,
    "concurrency": exact.concurrency,
    "prefix-cache": context.prefix_cache,
    "long-context": context.long_context,
    "json-schema": forms.json_schema,
    "tool-calls": forms.tool_calls,
    "sampled-law": sampled.sampled_law,
    "sampled-own": sampled.sampled_own,
    "mtp-on": told.mtp_on,
}


@dataclass(frozen=True)
class Report:
    """What a run found. requests: sent to all endpoints."""

    url: str
    model: str
    against: str | None
    checks: tuple[Check, ...]
    requests: int
    whole: bool

    @property
    def failed(self) -> bool:
        return any(check.outcome == "failed" for check in self.checks)

    def as_record(self) -> dict[str, object]:
        return asdict(self) | {"failed": self.failed}


def verify(
    target: Endpoint,
    against: Endpoint | None,
    prompts: Sequence[Prompt],
    settings: Settings,
    *,
    names: Sequence[str] = (),
    on_check: Callable[[str], None] = lambda name: None,
) -> Iterator[Check]:
    """Run the checks, or those named, and yield what each says as soon as it is known.

    An engine that fails in a check has failed it; when the requests or seconds allowed are over, the rest are unclear.
    Raises ConfigError for an unknown name, or two endpoints that are one.
    """
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ConfigError(f"no check {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    if against is not None and against.url == target.url:
        raise ConfigError(f"--against {against.url} is the endpoint under test; give the one without MTP")
    session = Session(target, against, prompts, settings)
    over: BudgetError | None = None
    told.read_counters(session)
    for name in names or CHECKS:
        on_check(name)
        try:
            yield CHECKS[name](session) if over is None else Check(name, "unclear", f"not run: {over}")
        except BudgetError as error:
            over = error
            yield Check(name, "unclear", f"not finished: {over}")
        except EngineError as error:
            yield _broken(name, error)
        told.read_counters(session)


def _broken(name: str, error: EngineError) -> Check:
    if is_refusal(error) or error.status in (401, 403, 429, 503):
        return Check(name, "unclear", f"the engine refuses: {error}")
    return Check(name, "failed", f"the engine failed: {error}", "see the engine's log at that time")
