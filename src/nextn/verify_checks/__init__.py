"""`verify`: checks over live endpoints that a served model's output is the same with MTP on and off. Imports no torch.

A check is a function from a `VerifySession` to a `CheckResult`; checks do not depend on each other.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from nextn.engines.check_result import CheckReport, CheckResult, Outcome
from nextn.engines.client import Budget, Limits
from nextn.engines.endpoint import Endpoint, is_refusal
from nextn.errors import BudgetError, ConfigError, EngineError
from nextn.evaluate.workload import Prompt, PromptSource, take_prompts
from nextn.verify_checks import context_checks, counter_checks, format_checks, greedy_checks, sampling_checks
from nextn.verify_checks.session import VerifySession, VerifySettings

__all__ = [
    "CHECKS",
    "CheckResult",
    "Outcome",
    "VerifyReport",
    "VerifySession",
    "VerifySettings",
    "run_checks",
    "verify",
]

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
    "temperature": sampling_checks.temperature,
    "mtp-on": counter_checks.mtp_on,
}
# Of one server alone: where the one without MTP fails them, too, MTP is not the cause.
_ALONE = frozenset({
    "replay", "max-tokens", "stop-strings", "streaming", "concurrency", "json-schema", "tool-calls", "sampled-logprobs"
})  # fmt: skip


@dataclass(frozen=True)
class VerifyReport(CheckReport):
    """The results of a run.

    Attributes:
        url: Address of the endpoint with MTP on.
        model: Name of the model that it serves.
        against: Address of the endpoint without MTP; None without one.
        checks: The results, in the order in which the checks ran.
        requests: Requests sent to all endpoints.
        is_complete: False if the run was interrupted.

    Example:
        >>> check = nextn.CheckResult("greedy", "failed", "text 3 differs at token 12")
        >>> nextn.VerifyReport("http://localhost:8000", "toy", None, (check,)).failed
        True
    """

    url: str
    model: str
    against: str | None
    checks: tuple[CheckResult, ...] = ()
    requests: int = 0
    is_complete: bool = False

    @property
    def has_inconclusive(self) -> bool:
        """Whether a check could not decide."""
        return any(check.outcome == "inconclusive" for check in self.checks)

    @property
    def summary(self) -> str:
        """What was checked and how it went, in one line."""
        counts = Counter(check.outcome for check in self.checks)
        total = ", ".join(f"{counts[outcome]} {outcome}" for outcome in get_args(Outcome) if counts[outcome])
        against = f" against {self.against}" if self.against else ""
        stopped = "" if self.is_complete else "  interrupted: the remaining checks were not run"
        where = f"{self.model} at {self.url}{against}"
        return f"{where}  {total or 'nothing checked'}  {self.requests} requests{stopped}"

    def to_dict(self) -> dict[str, object]:
        """Return the JSON of `nextn verify --json`."""
        about = {"url": self.url, "model": self.model, "against": self.against}
        return about | super().to_dict() | {"requests": self.requests, "complete": self.is_complete}


def verify(
    url: str,
    against: str | None = None,
    *,
    prompts: PromptSource = None,
    checks: Sequence[str] = (),
    settings: VerifySettings | None = None,
    chat: bool = False,
    max_seconds: float = 900.0,
    timeout: float = 120.0,
    on_check: Callable[[str], None] = lambda name: None,
) -> VerifyReport:
    """Check that a server's output is the same with MTP on and off.

    Args:
        url: An OpenAI-compatible endpoint with MTP on, such as `localhost:8000`; with `#MODEL` at its end if it serves
            several.
        against: The same model served without MTP; None leaves out what needs it.
        prompts: A file or benchmark, as `--prompts` takes them; texts; None: the built-in ones. Of conversations, the
            first turn is sent.
        checks: Names of checks to run; all of them if empty.
        settings: How much is sent, and what is tolerated.
        chat: Send prompts as user messages through the engine's chat template.
        max_seconds: Seconds that all requests to both endpoints may take.
        timeout: Seconds that one request may take.
        on_check: Called with the name of each check before it runs.

    Returns:
        The result of every check, with its evidence.

    Raises:
        ConfigError: An unknown check, the same address for both endpoints, or unusable prompts.
        EngineError: An endpoint does not answer as OpenAI's does.

    Example:
        >>> try:
        ...     nextn.verify("localhost:1")  # no engine there
        ... except nextn.NextnError as error:
        ...     print(type(error).__name__)
        EngineError
    """
    budget = Budget(Limits(seconds=max_seconds, answer_s=timeout))
    *_, report = verify_reports(
        url, against, prompts=prompts, checks=checks, settings=settings, chat=chat, budget=budget, on_check=on_check,
    )  # fmt: skip
    return report


def verify_reports(
    url: str,
    against: str | None,
    *,
    prompts: PromptSource,
    checks: Sequence[str],
    settings: VerifySettings | None,
    chat: bool,
    budget: Budget,
    on_check: Callable[[str], None],
) -> Iterator[VerifyReport]:
    """Connect, then yield the report so far, at first and after each check; arguments and errors are of `verify`."""
    connect = partial(Endpoint.open, budget=budget, chat=chat)
    target, reference = connect(url), connect(against) if against else None
    texts = [replace(prompt, later=()) for prompt in take_prompts(prompts)[0]]
    report = VerifyReport(target.url, target.served.name, None if reference is None else reference.url)
    yield report
    for result in run_checks(target, reference, texts, settings or VerifySettings(), names=checks, on_check=on_check):
        report = replace(report, checks=(*report.checks, result), requests=budget.used)
        yield report
    yield replace(report, requests=budget.used, is_complete=True)


def run_checks(
    target: Endpoint,
    against: Endpoint | None,
    prompts: Sequence[Prompt],
    settings: VerifySettings,
    *,
    names: Sequence[str] = (),
    on_check: Callable[[str], None] = lambda name: None,
) -> Iterator[CheckResult]:
    """Run checks (all, or those named), after `on_check` of each, and yield their results as they are known.

    An engine that breaks during a check has failed it. When the requests or seconds of the budget are used up, the
    remaining checks are inconclusive. `against` is the same model served without MTP; what fails there, too, is
    inconclusive. Raises ConfigError for an unknown name, or the same address for both endpoints.
    """
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ConfigError(f"no check {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    if against is not None and against.address == target.address:
        raise ConfigError(f"--against {against.address} is the endpoint under test; give the one without MTP")
    session = VerifySession(target, against, prompts, settings)
    exhausted: BudgetError | None = None
    for name in names or CHECKS:
        on_check(name)
        try:
            yield (
                _checked(name, session)
                if exhausted is None
                else CheckResult(name, "inconclusive", f"not run: {exhausted}")
            )
        except BudgetError as error:
            exhausted = error
            yield CheckResult(name, "inconclusive", f"not finished: {exhausted}")
        for span in session.counters.values():
            span.read()


def _checked(name: str, session: VerifySession) -> CheckResult:
    """Run a check; one that fails is run on the server without MTP, too. Raises BudgetError."""
    found = _result(name, session)
    if found.outcome != "failed" or name not in _ALONE or session.against is None:
        return found
    alone = session.without_mtp(session.against)
    try:
        again = _result(name, alone)
        if again.outcome == "failed":
            alone.target.answer(alone.greedy_request(alone.prompts[0]))  # a server that is down fails every check
    except EngineError as error:
        return replace(found, evidence=f"{found.evidence} (not repeated without MTP: {error})")
    if again.outcome != "failed":
        return replace(found, evidence=f"{found.evidence} (without MTP: {again.outcome})")
    evidence = f"the server without MTP fails it, too: {found.evidence}; without MTP: {again.evidence}"
    return replace(found, outcome="inconclusive", evidence=evidence, advice="")


def _result(name: str, session: VerifySession) -> CheckResult:
    """Run a check, which an engine that breaks has failed. Raises BudgetError."""
    try:
        return CHECKS[name](session)
    except BudgetError:
        raise
    except EngineError as error:
        return _engine_error(name, error)


def _engine_error(name: str, error: EngineError) -> CheckResult:
    if is_refusal(error) or error.status in (401, 403, 429, 503):
        return CheckResult(name, "inconclusive", f"the engine refuses: {error}")
    return CheckResult(name, "failed", f"the engine failed: {error}", "see the engine's log at that time")
