"""`verify`: checks over live endpoints that a served model's output is the same with MTP on and off. Imports no torch.

A check is a function from a `VerifySession` to a `CheckResult`; checks do not depend on each other.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from nextn.engines.check_result import CheckReport, CheckResult, Outcome
from nextn.engines.endpoint import Endpoint, is_refusal
from nextn.errors import BudgetError, ConfigError, EngineError
from nextn.evaluate.workload import Prompt
from nextn.verify import context_checks, counter_checks, format_checks, greedy_checks, sampling_checks
from nextn.verify.session import VerifySession, VerifySettings

__all__ = ["CHECKS", "CheckResult", "Outcome", "VerifyReport", "VerifySession", "VerifySettings", "verify"]

# Cheap and informative ones first, so that a run that is cut short has found most.
CHECKS: dict[str, Callable[[VerifySession], CheckResult]] = {
    "greedy": greedy_checks.greedy,
    "replay": greedy_checks.replay,
    "logprobs": counter_checks.logprobs,
    "max-tokens": format_checks.max_tokens,
    "stop-strings": format_checks.stop_strings,
    "streaming": greedy_checks.streaming,
    "concurrency": greedy_checks.concurrency,
    "prefix-cache": context_checks.prefix_cache,
    "long-context": context_checks.long_context,
    "json-schema": format_checks.json_schema,
    "tool-calls": format_checks.tool_calls,
    "sampled-distribution": sampling_checks.sampled_distribution,
    "sampled-logprobs": sampling_checks.sampled_calibration,
    "mtp-on": counter_checks.mtp_on,
}


@dataclass(frozen=True)
class VerifyReport(CheckReport):
    """The results of a run."""

    url: str
    model: str
    against: str | None  # address of the endpoint without MTP
    results: tuple[CheckResult, ...]
    requests: int  # sent to all endpoints
    is_complete: bool  # False if the run was interrupted

    @property
    def checks(self) -> tuple[CheckResult, ...]:
        return self.results

    @property
    def has_inconclusive(self) -> bool:
        return any(check.outcome == "inconclusive" for check in self.checks)

    @property
    def summary(self) -> str:
        counts = Counter(check.outcome for check in self.checks)
        total = ", ".join(f"{counts[outcome]} {outcome}" for outcome in get_args(Outcome) if counts[outcome])
        against = f" against {self.against}" if self.against else ""
        stopped = "" if self.is_complete else "  interrupted: the remaining checks were not run"
        where = f"{self.model} at {self.url}{against}"
        return f"{where}  {total or 'nothing checked'}  {self.requests} requests{stopped}"

    def as_record(self) -> dict[str, object]:
        about = {"url": self.url, "model": self.model, "against": self.against}
        return about | super().as_record() | {"requests": self.requests, "complete": self.is_complete}


def verify(
    target: Endpoint,
    against: Endpoint | None,
    prompts: Sequence[Prompt],
    settings: VerifySettings,
    *,
    names: Sequence[str] = (),
    on_check: Callable[[str], None] = lambda name: None,
) -> Iterator[CheckResult]:
    """Run checks and yield their results, each as soon as it is known.

    An engine that breaks during a check has failed it. When the requests or seconds of the budget are used up, the
    remaining checks are inconclusive.

    Args:
        target, against: The endpoint with MTP on; the same model served without it, or None.
        names: Checks to run; all of them if empty.
        on_check: Called with the name of each check before it runs.

    Raises:
        ConfigError: An unknown name, or the same address for both endpoints.
    """
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ConfigError(f"no check {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    if against is not None and against.url == target.url:
        raise ConfigError(f"--against {against.url} is the endpoint under test; give the one without MTP")
    session = VerifySession(target, against, prompts, settings)
    exhausted: BudgetError | None = None
    for name in names or CHECKS:
        on_check(name)
        try:
            yield (
                CHECKS[name](session)
                if exhausted is None
                else CheckResult(name, "inconclusive", f"not run: {exhausted}")
            )
        except BudgetError as error:
            exhausted = error
            yield CheckResult(name, "inconclusive", f"not finished: {exhausted}")
        except EngineError as error:
            yield _engine_error(name, error)
        for span in session.counters.values():
            span.read()


def _engine_error(name: str, error: EngineError) -> CheckResult:
    if is_refusal(error) or error.status in (401, 403, 429, 503):
        return CheckResult(name, "inconclusive", f"the engine refuses: {error}")
    return CheckResult(name, "failed", f"the engine failed: {error}", "see the engine's log at that time")
