"""Costs of decoding with other numbers of cores: a roofline over times of one core and the bandwidth of memory.

A pass is predicted to take the time that it takes on one core, divided by the number of cores, but not less than
reading the weights takes. Waiting at barriers, threads of other processes and NUMA are not in it: it is a bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from nextn.evaluate.decoding_costs import copy_bandwidth, measure_costs, step_bytes
from nextn.model.model import Model
from nextn.runtime.backend import backend_for
from nextn.runtime.native.abi import load
from nextn.settings import available_cores
from nextn.stats.speedup import Costs


@dataclass(frozen=True)
class CoreForecast:
    """Seconds of passes over 1, 2, ... positions with a number of cores."""

    cores: int
    predicted: tuple[float, ...]
    measured: tuple[float, ...] | None  # None: this machine has not so many cores

    def as_record(self) -> dict[str, object]:
        return {"cores": self.cores, "predicted_s": self.predicted, "measured_s": self.measured}


@dataclass(frozen=True)
class CoreScaling:
    """Forecasts by number of cores, and what they follow from."""

    step_bytes: int  # of weights that a baseline step reads
    bandwidth: float  # bytes/s of memory
    forecasts: tuple[CoreForecast, ...]

    def as_record(self) -> dict[str, object]:
        forecasts = [each.as_record() for each in self.forecasts]
        return {"step_bytes": self.step_bytes, "bandwidth": self.bandwidth, "forecasts": forecasts}


def predict_step(one_core: float, cores: int, num_bytes: int, bandwidth: float) -> float:
    """Return the seconds of a pass that takes `one_core` seconds on one core."""
    return max(one_core / cores, num_bytes / bandwidth)


def scale_cores(
    model: Model,
    cores: Sequence[int],
    *,
    num_speculative_tokens: int,
    context: int = 256,
    bandwidth: float | None = None,
) -> CoreScaling:
    """Time passes with one core and with each of `cores` that this machine has, and predict those with all of them.

    Args:
        model: A model with a head.
        cores: Numbers of cores.
        num_speculative_tokens: Passes have up to one position more.
        context: Positions before the passes.
        bandwidth: Of the memory, in bytes/s. Default: of a copy here, with torch's threads.

    Raises:
        ConfigError: The native backend cannot run the model, or see `measure_costs`.
    """
    weight_bits = backend_for(model, "native").weight_bits
    bandwidth = bandwidth or copy_bandwidth(model.trunk.device)
    num_bytes, measured = step_bytes(model.trunk, weight_bits), dict[int, Costs]()
    for number in sorted({1, *(each for each in cores if each <= available_cores())}):
        with load().with_threads(number):
            measured[number] = measure_costs(
                model, num_speculative_tokens=num_speculative_tokens, context=context, backend="native"
            )
    one_core = [step.median for step in measured[1].steps]
    return CoreScaling(
        num_bytes,
        bandwidth,
        tuple(
            CoreForecast(
                number,
                tuple(predict_step(step, number, num_bytes, bandwidth) for step in one_core),
                tuple(step.median for step in measured[number].steps) if number in measured else None,
            )
            for number in cores
        ),
    )
