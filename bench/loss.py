"""Time, extra memory and error of the MTP loss, forward and backward, against plain autograd and torch's chunked loss.

"head, ..." are the distillation losses of a head, which also compute the frozen trunk's distributions.

Each case runs in a process of its own; memory is the rise of its resident high-water mark above the inputs (Linux).

    python bench/loss.py --out loss.json
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from memory import resident
from record import write_record
from torch import Tensor

from nextn.losses.chunked import IGNORE
from nextn.losses.distillation import OBJECTIVES, head_loss
from nextn.losses.divergences import Teacher
from nextn.losses.mtp_loss import Targets, mtp_loss

LAMBDA = 0.3

Mean = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden, weight, labels) -> mean cross-entropy
Policy = Literal["balanced", "auto"]
Loss = Callable[[list[Tensor], Tensor, Targets], Tensor]  # also leaves gradients behind


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def plain_fp32(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden.float() @ weight.float().T, labels)


def torch_mean(hidden: Tensor, weight: Tensor, labels: Tensor, *, policy: Policy) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


def torch_none(hidden: Tensor, weight: Tensor, labels: Tensor, *, policy: Policy) -> Tensor:
    """Reduced by us in fp32: torch 2.13 sums the chunks of "mean" in bf16, which is several per cent off."""
    options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
    nll = F.linear_cross_entropy(hidden, weight, labels, reduction="none", options=options)
    return nll.float().sum() / (labels != IGNORE).sum()


def terms(hiddens: list[Tensor], weight: Tensor, targets: Targets, mean: Mean) -> Iterator[Tensor]:
    """Yield L_main and (lambda / D) L_k; each is computed lazily."""
    for k, hidden in enumerate(hiddens):
        share = LAMBDA / (len(hiddens) - 1) if k else 1.0
        yield share * mean(hidden.flatten(0, 1), weight, targets.labels(k).flatten())


def together(hiddens: list[Tensor], weight: Tensor, targets: Targets, *, mean: Mean) -> Tensor:
    """One backward for all depths, as most training code does it."""
    total = torch.stack([*terms(hiddens, weight, targets, mean)]).sum()
    total.backward()
    return total.detach()


def in_turn(hiddens: list[Tensor], weight: Tensor, targets: Targets, *, mean: Mean) -> Tensor:
    """Backward after each depth, so that the logits of one depth live at a time (arXiv 2404.19737, figure 2)."""
    total = torch.zeros(())
    for loss in terms(hiddens, weight, targets, mean):
        loss.backward()
        total += loss.detach()
    return total


def ours(hiddens: list[Tensor], weight: Tensor, targets: Targets, *, frozen: bool = False) -> Tensor:
    report = mtp_loss(hiddens, weight.detach() if frozen else weight, targets, lam=LAMBDA)
    report.total.backward()
    return report.total.detach()


def head(hiddens: list[Tensor], weight: Tensor, targets: Targets, *, objective: str) -> Tensor:
    """The trunk is frozen, and so is the lm_head that all depths share."""
    teacher = Teacher(hiddens[0].detach(), weight.detach())
    total = head_loss(hiddens[1:], teacher.weight, teacher, targets, objective=objective).total
    total.backward()
    return total.detach()


def plain_kl(hiddens: list[Tensor], weight: Tensor, targets: Targets) -> Tensor:
    """Both distributions of one depth at a time in fp32, as most training code does it."""
    total, weight = torch.zeros(()), weight.detach().float()
    for k, hidden in enumerate(hiddens[1:], start=1):
        valid = targets.labels(k) != IGNORE
        probs = (hiddens[0].detach()[:, k:][valid].float() @ weight.T).log_softmax(-1)
        drafted = (hidden[valid].float() @ weight.T).log_softmax(-1)
        loss = F.kl_div(drafted, probs, log_target=True, reduction="batchmean") / (len(hiddens) - 1)
        loss.backward()
        total += loss.detach()
    return total


METHODS: dict[str, Loss] = {
    "fp32 reference, depths in turn": partial(in_turn, mean=plain_fp32),
    "plain, all depths together": partial(together, mean=plain),
    "plain, depths in turn": partial(in_turn, mean=plain),
    "ours": ours,
    "ours, frozen weight": partial(ours, frozen=True),
}
if hasattr(F, "linear_cross_entropy"):
    METHODS |= {
        "torch balanced mean": partial(in_turn, mean=partial(torch_mean, policy="balanced")),
        "torch balanced none": partial(in_turn, mean=partial(torch_none, policy="balanced")),
        "torch auto mean": partial(in_turn, mean=partial(torch_mean, policy="auto")),
    }
REFERENCE = next(iter(METHODS))
HEAD_REFERENCE = "fp32 KL of a head, depths in turn"
METHODS[HEAD_REFERENCE] = plain_kl
METHODS |= {f"head, {objective}": partial(head, objective=objective) for objective in OBJECTIVES}
REFERENCES = {name: REFERENCE for name in METHODS if "head" not in name}
REFERENCES |= dict.fromkeys((HEAD_REFERENCE, "head, kl"), HEAD_REFERENCE)


@dataclass(frozen=True)
class Case:
    method: str
    depths: int
    tokens: int
    vocabulary: int
    width: int
    threads: int
    repeats: int


@dataclass(frozen=True)
class Record:
    method: str
    depths: int
    loss: float
    seconds: float  # forward + backward, least of the repeats
    extra_mb: float  # 1e6 bytes above the inputs, gradients of hidden and weight included


def inputs(case: Case, tokens: int) -> tuple[list[Tensor], Tensor, Targets]:
    """Create the inputs in bf16 directly, so that no larger copy raises the peak; the same for every method."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    hiddens = [draw(1, tokens - k, case.width).requires_grad_() for k in range(case.depths + 1)]
    weight = draw(case.vocabulary, case.width).mul_(case.width**-0.5).requires_grad_()
    return hiddens, weight, Targets(torch.arange(tokens)[None] * 7919 % case.vocabulary)


def measure(case: Case) -> Record:
    torch.set_num_threads(case.threads)
    METHODS[case.method](*inputs(case, tokens=16))  # a warm-up: loads kernels, starts threads
    hiddens, weight, targets = inputs(case, tokens=case.tokens)
    before, seconds, extra = resident("VmRSS"), [], 0
    for _ in range(case.repeats):
        for leaf in (*hiddens, weight):
            leaf.grad = None
        start = time.perf_counter()
        loss = METHODS[case.method](hiddens, weight, targets)
        seconds.append(time.perf_counter() - start)
        extra = extra or resident("VmHWM") - before
    return Record(case.method, case.depths, loss.item(), min(seconds), extra / 1e6)


def in_new_process(case: Case) -> Record:
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Record(**json.loads(done.stdout))


def run(options: argparse.Namespace) -> list[Record]:
    records = []
    for depths in options.depths:
        for method in chosen(options.only):
            if method == "plain, all depths together" and depths > 1:
                continue  # 1.5 GB per depth
            case = {name: getattr(options, name) for name in ("tokens", "vocabulary", "width", "threads", "repeats")}
            records.append(in_new_process(Case(method=method, depths=depths, **case)))
            print_row(records[-1], records)
    return records


def chosen(pattern: str) -> list[str]:
    """Return the methods that match, and their references, in the order of the table."""
    matches = {name for name in METHODS if re.search(pattern, name)}
    return [name for name in METHODS if name in matches | {REFERENCES[each] for each in matches & REFERENCES.keys()}]


def error(record: Record, records: list[Record]) -> float | None:
    """Return the difference of the loss from the fp32 reference of the same objective; None without one."""
    for other in records:
        if (other.method, other.depths) == (REFERENCES.get(record.method), record.depths):
            return record.loss - other.loss
    return None


def print_row(record: Record, records: list[Record]) -> None:
    difference = error(record, records)
    columns = f"{record.seconds:8.2f} s {record.extra_mb:8.0f} MB {record.loss:12.6f} "
    columns += "" if difference is None else f"{difference:+10.1e}"
    print(f"{record.depths} depths  {record.method:36}{columns}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the JSON record")
    parser.add_argument("--only", default="", help="pattern of the methods to run, with their references")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    for name, default in (("tokens", 4096), ("vocabulary", 32768), ("width", 512), ("threads", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    if options.case:
        print(json.dumps(asdict(measure(Case(**json.loads(options.case))))))
        return
    records = run(options)
    setting = {name: value for name, value in vars(options).items() if name not in ("out", "case", "only")}
    setting |= {"dtype": "bfloat16", "lambda": LAMBDA}
    rows = [asdict(record) | {"error": error(record, records)} for record in records]
    write_record(options.out, {"setting": setting, "metrics": rows})


if __name__ == "__main__":
    main()
