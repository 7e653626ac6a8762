"""The policy of a server: simulated costs and acceptance, no model; times that an idle server measures."""

import random

import pytest

from nextn.runtime.backend import backend_for
from nextn.serve.round_costs import measure_round_costs
from nextn.serve.scheduler import Group
from nextn.speculative.batch_costs import RoundCosts
from nextn.speculative.measured_length import AcceptanceEstimate, MeasuredLength, candidate_lengths


class Simulation:
    """Rounds of one batch size after the other: costs[batch size](K) in seconds, and the acceptance of each draft."""

    def __init__(self, policy, costs, rate, *, catch_up=0.0, seed=0):
        self.policy, self.costs, self.rate, self.catch_up = policy, costs, rate, catch_up
        self.random, self.num_plain = random.Random(seed), 0
        self.used, self.seconds, self.tokens = [], 0.0, 0

    def run(self, batch_size, num_rounds):
        """Return the K of each round."""
        used = []
        for _ in range(num_rounds):
            length = self.policy.at(batch_size)
            assert length.rounds_unchanged(batch_size) >= 1
            k = length.plan().max_speculative_tokens
            seconds = self.costs(batch_size, k) * self.random.uniform(0.95, 1.05)
            if k and self.num_plain:  # the head processes what it has put off
                seconds += self.catch_up * min(self.num_plain, 512)
            self.num_plain = 0 if k else self.num_plain + 1
            tokens = 0
            for _ in range(batch_size):
                accepted = 0
                while accepted < k and self.random.random() < self.rate:
                    accepted += 1
                length.learn([1.0] * k, num_draft_tokens=k, num_accepted=accepted)
                tokens += accepted + 1
            length.observe(tokens, seconds)
            used.append(k)
            self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
        self.used += used
        return used


def linear(batch_size, k):
    """A pass over many positions costs as much as they are; one over few costs what reading the weights does."""
    return max(8, 4 + batch_size * (k + 1) / 4) + k


def measured(policy, costs=linear, sizes=(1, 2, 4, 8, 16)):
    for size in sizes:
        policy.costs.set(size, {k: costs(size, k) for k in range(5)})
    return policy


def in_service(policy, size, costs):
    """Set costs of which that of the most drafts agrees with a round in service."""
    policy.costs.set(size, costs)
    policy.costs.observe(size, 4, costs[4], is_ratio=True, num_before=0)


def best_rate(batch_size, rate, costs=linear):
    expected = [sum(rate**depth for depth in range(k + 1)) for k in range(5)]
    return max(batch_size * expected[k] / costs(batch_size, k) for k in range(5))


@pytest.mark.more
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("is_warm", [True, False])
def test_it_uses_what_is_fastest(rate, is_warm):
    """At every batch size, at most a few percent below the best K that is known beforehand."""
    policy = MeasuredLength(4)
    simulation = Simulation(measured(policy) if is_warm else policy, linear, rate, catch_up=0.05)
    for size in (1, 2, 4, 8, 16, 12, 5):
        simulation.run(size, 100)
        before = simulation.seconds, simulation.tokens
        simulation.run(size, 2000)
        seconds, tokens = simulation.seconds - before[0], simulation.tokens - before[1]
        assert tokens / seconds > 0.955 * best_rate(size, rate)


def test_known_costs_need_no_trials():
    """With costs and acceptance known, a batch that must not draft does not, from its first round on."""
    simulation = Simulation(measured(MeasuredLength(4)), linear, 0.5)
    simulation.run(1, 100)
    used = simulation.run(16, 200)
    assert used[0] == 0
    assert sum(map(bool, used)) <= 2


def test_unknown_costs_are_tried_once():
    simulation = Simulation(MeasuredLength(4), linear, 0.5)
    used = simulation.run(8, 16)
    assert used[:8] == [4] * 4 + [0] * 4
    assert set(simulation.policy.costs.row(8)) == {0, 1, 2, 3, 4}
    simulation.run(8, 200)
    assert 0 < simulation.used.count(2) <= 12  # may be the fastest by the costs of 0 and 4
    assert 3 not in simulation.used


@pytest.mark.more
def test_probes_cost_little_and_find_what_has_changed():
    """At a batch size that drafts nothing: at most 1 % of the time, and new text is noticed."""
    simulation = Simulation(measured(MeasuredLength(4)), linear, 0.05, catch_up=0.2)
    simulation.run(8, 600)
    before, used = simulation.seconds, simulation.run(8, 20_000)
    lost = (simulation.seconds - before) / (20_000 * linear(8, 0)) - 1
    assert 0 < sum(map(bool, used)) < 0.01 * 20_000
    assert lost < 0.012
    simulation.rate = 0.97
    used = simulation.run(8, 20_000)
    assert used[-1000:].count(4) > 900


def test_larger_batches_are_probed_shorter():
    lengths = {}
    for size in (1, 4, 16):
        policy = MeasuredLength(4)
        costs = {0: 1.0, 1: 2.1, 2: 3.2, 3: 4.2, 4: 4.5}
        policy.costs.set(size, costs)
        used = Simulation(policy, lambda size, k, costs=costs: costs[k], 0.5).run(size, 100)
        lengths[size] = used.index(0)
    assert lengths == {1: 16, 4: 4, 16: 1}


def test_probes_that_cost_more_come_later():
    """Where the acceptance is known; without drafts, the rounds since the last draft of any length count."""
    costs, firsts = {0: 1.0, 1: 2.1, 2: 3.2, 3: 4.2, 4: 4.5}, {}
    for size in (1, 16):
        policy = MeasuredLength(4)
        policy.costs.set(size, costs)
        in_service(policy, 32, {0: 1.0, 1: 1.0, 2: 3.1, 3: 4.1, 4: 5.1})
        for number in range(300):
            policy.acceptance.learn(4, int(number % 5 == 0))
        simulation = Simulation(policy, lambda size, k, costs=costs: costs[k] if size < 32 else 1.0, 0.2)
        assert simulation.run(32, 1000).count(1) >= 960  # rounds without drafts are checked, at first more often
        firsts[size] = [*map(bool, simulation.run(size, 8000))].index(True)
    assert 256 < firsts[16] < 1500 < 4096 < firsts[1]


def test_no_probe_where_full_acceptance_would_not_pay():
    """In a batch whose rounds with K drafts take about K + 1 times as long; the times are checked now and then."""
    policy = MeasuredLength(4)
    in_service(policy, 32, {0: 1.0, 1: 1.97, 2: 2.95, 3: 3.93, 4: 4.92})
    simulation = Simulation(policy, lambda size, k: 0.985 * (k + 1) if k else 1.0, 0.9, catch_up=0.2)
    assert not any(simulation.run(32, 4000))
    assert 0 < simulation.run(32, 5000).count(4) <= 4


def test_probes_are_no_longer_than_what_may_pay():
    policy = MeasuredLength(4)
    in_service(policy, 32, {0: 1.0, 1: 1.8, 2: 2.8, 3: 4.4, 4: 5.5})
    used = Simulation(policy, lambda size, k: {0: 1.0, 1: 1.8, 2: 2.8}[k], 0.5).run(32, 20_000)
    assert used[0] == 2
    assert set(used) == {0, 2}
    assert used.count(2) <= 20
    policy = MeasuredLength(4)
    in_service(policy, 8, {0: 1.0, 1: 1.2, 2: 1.7, 3: 9.0, 4: 12.0})
    used = Simulation(policy, lambda size, k: {0: 1.0, 1: 1.2, 2: 1.7}[k], 0.3).run(8, 20_000)
    assert set(used) == {0, 1, 2}
    assert used.count(2) <= 20
    assert used.count(0) <= (20_000 / 512 + 5) * 8  # they might be the fastest


def test_a_busier_machine_changes_nothing():
    """All costs rise together, of which only those of the K in use are seen."""
    simulation = Simulation(measured(MeasuredLength(4)), linear, 0.05)
    simulation.run(8, 3000)
    for factor in (3.0, 0.5, 1.0):
        simulation.costs = lambda size, k, factor=factor: factor * linear(size, k)
        assert sum(map(bool, simulation.run(8, 250))) <= 2


@pytest.mark.more
@pytest.mark.parametrize(
    ("size", "costs", "num_rounds"),
    [
        (4, {0: 8.0, 1: 30.0, 2: 30.0, 3: 35.0, 4: 40.0}, 1_000),
        (4, {0: 8.0, 1: 9.0, 2: 10.0, 3: 35.0, 4: 45.0}, 6_000),
        (1, {0: 10.0, 4: 52.0}, 1_000),
        (4, {0: 10.0, 4: 52.0}, 6_000),
    ],
)
def test_wrong_costs_are_corrected(size, costs, num_rounds):
    """Those measured while something else was running: by rounds that follow a change of K."""
    policy = MeasuredLength(4)
    policy.costs.set(size, costs)
    simulation = Simulation(policy, linear, 0.95)
    simulation.run(size, num_rounds)
    assert min(simulation.run(size, 500)) >= 3
    simulation.run(size, 11_000)
    assert policy.costs.row(size)[4] / policy.costs.row(size)[0] < 3 < 40 / 8
    assert min(simulation.used[-500:]) >= 3


def test_a_plain_round_that_was_measured_as_too_slow():
    """Drafts that do not pay are given up, though rounds without them seemed to take a third longer."""
    policy = MeasuredLength(4)
    policy.costs.set(1, {0: 10.5, 1: 9.0, 2: 10.0, 3: 11.0, 4: 12.0})
    assert policy.costs.row(1)[0] == policy.costs.row(1)[1]  # more drafts are no cheaper
    policy.costs.observe(1, 1, 8.0, is_ratio=True, num_before=0)
    simulation = Simulation(policy, linear, 0.03)
    simulation.run(1, 1500)
    before, used = simulation.seconds, simulation.run(1, 4000)
    assert used.count(0) > 0.97 * len(used)
    assert simulation.seconds - before < 1.01 * 4000 * linear(1, 0)
    payed = Simulation(measured(MeasuredLength(4)), linear, 0.9)
    payed.run(1, 600)
    assert 0 not in payed.run(1, 4000)  # where drafts pay by far more than a measurement may be wrong


def test_costs_that_a_busy_machine_has_flattened_are_corrected_soon():
    """Two servers that start together measure at the same time, and rounds with drafts may seem too cheap."""
    policy = MeasuredLength(4)
    policy.costs.set(16, {k: linear(16, k) * (1.0 if k == 0 else 0.75) for k in range(5)})
    simulation = Simulation(policy, linear, 0.45)
    assert 0 not in simulation.run(16, 16)
    simulation.run(16, 64)
    assert simulation.run(16, 200).count(0) >= 180


def test_one_slow_round_is_no_measure():
    """The first of a change, whatever it takes; a later one by a little."""
    simulation = Simulation(measured(MeasuredLength(4)), linear, 0.05)
    simulation.run(8, 100)
    before = simulation.policy.costs.row(8)
    simulation.policy.at(8).observe(8, 10**6)
    after = simulation.policy.costs.row(8)
    assert all(after[k] < 1.1 * before[k] for k in before)
    simulation.policy.at(4).plan()
    before = simulation.policy.costs.row(4)
    simulation.policy.at(4).observe(4, 10**6)
    assert simulation.policy.costs.row(4) == before


def test_costs_between_measured_batch_sizes():
    costs = RoundCosts(candidate_lengths(4))
    costs.set(4, {0: 1.0, 4: 3.0})
    costs.set(8, {0: 2.0, 2: 2.5, 4: 7.0})
    assert costs.row(6) == pytest.approx({0: 1.5, 1: 1.875, 2: 2.25, 3: 3.625, 4: 5.0})
    assert costs.row(16) == costs.row(8) == pytest.approx({0: 2.0, 1: 2.25, 2: 2.5, 3: 4.75, 4: 7.0})
    assert costs.row(17) == costs.row(1) == {}
    costs.observe(16, 0, 5.0, is_ratio=False, num_before=0)  # derived, so no source for others
    assert costs.row(32) == {}


def test_rates_of_depths():
    estimate = AcceptanceEstimate(3)
    assert estimate.rates == pytest.approx([0.7] * 3)
    for _ in range(300):
        estimate.learn(2, 2)
        estimate.learn(2, 0)
    first, second, third = estimate.rates
    assert first == pytest.approx(0.5, abs=0.02)
    assert second == third > 0.98
    assert estimate.expected_tokens(2) == pytest.approx(1 + first + first * second)
    assert estimate.expected_by_length() == pytest.approx([estimate.expected_tokens(k) for k in range(4)])
    estimate.fade()
    assert estimate.rates == pytest.approx([first, second, third], abs=0.05)
    for _ in range(64):
        estimate.learn(2, 2)
    assert estimate.rates[0] > 0.7


def test_candidates():
    assert candidate_lengths(1) == (0, 1)
    assert candidate_lengths(5) == (0, 1, 2, 3, 4, 5)
    assert candidate_lengths(16) == (0, 1, 2, 3, 4, 6, 8, 12, 16)


def test_the_reason_names_all():
    policy = measured(MeasuredLength(4))
    policy.at(1).plan()
    assert policy.at(1).reason.startswith("4 drafts per round; expected: K = 0: 0 tokens/s, K = 1: ")


@pytest.mark.parametrize(("max_model_len", "is_measured"), [(128, True), (8, False)])
def test_short_context(trained, max_model_len, is_measured):
    """Catches a small model whose sequences reach their maximum length before all numbers of drafts are measured."""
    backend = backend_for(trained["glm_two"], "native")
    times = measure_round_costs(backend, 2, Group(True, 2, True, 0), max_model_len=max_model_len)
    assert (times is not None) == is_measured
    assert times is None or (times.head.keys() == {0, 1, 2} and min(times.head.values()) > 0)


def test_interrupted(trained):
    backend = backend_for(trained["glm_two"], "native")
    looks, group = iter([False] * 4), Group(True, 2, True, 0)
    stopped = measure_round_costs(backend, 1, group, max_model_len=512, is_interrupted=lambda: next(looks, True))
    assert stopped is None
