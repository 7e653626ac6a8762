"""Requests on a scheduler without an engine's thread: each arrives after a number of steps."""

import time

from nextn.runtime.backend import backend_for
from nextn.serve.scheduler import Scheduler, SchedulerLimits
from nextn.serve.served_batch import ServedSequence
from nextn.speculative.draft_policy import NO_DRAFTS, FixedLength


class Text:
    """In the place of a TextStream: these models have no tokenizer."""

    def push(self, tokens, eos, *, last):
        return "".join(f"{token} " for token in tokens)

    def stop_after(self, new):
        return new.index(7) + 1 if 7 in new else None


class Switched(FixedLength):
    """K drafts, or none while `is_off`."""

    is_off = True

    def plan(self):
        return NO_DRAFTS if self.is_off else super().plan()


class Clock:
    """Each look takes a millisecond."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


class GivenPolicies:
    """In the place of DraftPolicies: length(number of sequences) is the policy of every group."""

    def __init__(self, length):
        self.length = length

    def policy(self, group, num_sequences):
        return self.length(num_sequences)

    expected = policy


def scheduler_of(model, *, backend="auto", clock=time.monotonic, has_arrivals=lambda: False, length=None, **limits):
    """length: number of sequences -> the policy for how many tokens are drafted; None: measured."""
    settings = SchedulerLimits(**{"max_model_len": 400, "num_speculative_tokens": 3} | limits)
    policies = None if length is None else GivenPolicies(length)
    backend = backend_for(model, backend)
    return Scheduler(backend, settings, clock=clock, has_arrivals=has_arrivals, policies=policies)


class Answers:
    """Runs requests on a scheduler, each arriving after a number of steps."""

    def __init__(self, scheduler):
        self.scheduler, self.chunks, self.sequences = scheduler, {}, {}

    def add(self, name, request, *, text=None):
        self.chunks[name] = []
        sequence = ServedSequence.of(request, self.chunks[name].append, text or Text(), len(self.sequences))
        self.sequences[name] = sequence
        self.scheduler.waiting.append(sequence)

    def run(self, arrivals=()):
        arrivals, number = dict(arrivals), 0
        while arrivals or not self.scheduler.is_idle:
            for name, request in arrivals.pop(number, []):
                self.add(name, request)
            self.scheduler.step()
            number += 1
            assert number < 5000
        return {name: self.text(name) for name in self.chunks}

    def text(self, name):
        return [token for chunk in self.chunks[name] for each in chunk.rounds for token in each.emitted]

    def logprobs(self):
        """Those of all requests."""
        return [each.logprob for chunks in self.chunks.values() for chunk in chunks for each in chunk.logprobs]

    def rounds(self, name):
        return [(each.drafts, each.num_accepted, each.emitted) for chunk in self.chunks[name] for each in chunk.rounds]


def alone(model, requests, **options):
    answers = {}
    for name, request in requests.items():
        single = Answers(scheduler_of(model, **options))
        answers |= single.run({0: [(name, request)]})
    return answers
