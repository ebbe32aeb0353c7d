"""Compares predicted with published speeds: half of the rows, drawn at random, calibrate the constants of the model.

    python tests/campaigns/planner.py                    the errors of both halves
    python tests/campaigns/planner.py --calibrate        fit the constants to the calibration half, and print them
    python tests/campaigns/planner.py --rows=8           only the first rows

The constants are the defaults of planner/hardware.py, class Fitted.
"""

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed

from tests.campaigns.published_time import ROWS, Row
from torchtitan_clone.config import load_config
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.planner.hardware import Fitted, read_hardware
from torchtitan_clone.planner.time_model import StepTime, predict_step_time
from torchtitan_clone.run import preflight
from torchtitan_clone.run.plan import RunPlan

SEED = 15
"""Of the split into halves."""
Case = tuple[Row, RunPlan]


def resolved(row: Row) -> RunPlan:
    """Returns the plan of a row."""
    config = load_config([f"--{key}={toml_like(value)}" for key, value in row.options.items()])
    return preflight.resolve(config, world_size=row.gpus, device_type="cuda")


def predicted(case: Case, *, fitted: Fitted) -> StepTime:
    """Returns the predicted step of a row."""
    row, plan = case
    return predict_step_time(plan, hardware=replace(read_hardware(row.hardware), fitted=fitted))


def published(case: Case) -> float:
    """Returns the published tokens per second and device."""
    row, plan = case
    return row.tokens_per_second or row.tflops * 1e12 / plan.flops_per_token


def error(case: Case, *, fitted: Fitted) -> float:
    """Returns by which fraction the prediction is above the published speed."""
    return predicted(case, fitted=fitted).tokens_per_second / published(case) - 1


def calibrate(loss: Callable[[Fitted], float], *, start: Fitted) -> Fitted:
    """Returns constants that minimize the loss, found by changing one at a time by less and less."""
    best, least = start, loss(start)
    for step in (1.3, 1.15, 1.07, 1.03):
        improved = True
        while improved:
            improved = False
            for name, value in asdict(best).items():
                for changed in (value * step, value / step):
                    low, high = LIMITS.get(name, (0.0, math.inf))
                    candidate = replace(best, **{name: max(low, min(changed, high))})
                    if (found := loss(candidate)) < least - 1e-6:
                        best, least, improved = candidate, found, True
        print(f"  steps of {step}: loss {least:.4f}", flush=True)
    return best


LIMITS = {
    "products": (0.0, 1.0), "attention": (0.0, 1.0), "link": (0.0, 1.0), "async_tensor": (0.0, 1.0),
    "network": (0.6, 1.0), "latency": (1.0, 3.0),
}  # fmt: skip
"""Values that are possible: large messages reach most of a network's bandwidth, and small ones take microseconds."""


def mean_log_error(cases: Sequence[Case], *, fitted: Fitted) -> float:
    """Returns the mean of |log(predicted / published)|, in which one bad row counts once."""
    return statistics.fmean(abs(math.log1p(error(case, fitted=fitted))) for case in cases)


def print_table(cases: Sequence[Case], *, fitted: Fitted) -> None:
    for case in cases:
        row, plan = case
        step = predicted(case, fitted=fitted)
        parts = ", ".join(
            f"{name} {seconds / step.seconds:.0%}"
            for name, seconds in step.parts.items()
            if seconds > step.seconds / 50
        )
        model = f"{plan.config.model.name} {plan.parameter_count / 1e9:.1f}B"
        numbers = f"{published(case):10.1f}{step.tokens_per_second:10.1f}{error(case, fitted=fitted):+8.1%}"
        print(f"{row.source[:40]:41}{model:20}{row.gpus:5}{numbers}  {parts}")


def main(words: list[str] | None = None) -> int:
    """Prints the table of each half and its errors; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true", help="fit the constants first")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="number of rows, of all")
    args = parser.parse_args(words)
    cases = [(row, resolved(row)) for row in ROWS[: args.rows]]
    random.Random(SEED).shuffle(cases)
    halves = {"calibration": cases[::2], "held out": cases[1::2]}
    fitted = Fitted()
    if args.calibrate:
        fitted = calibrate(lambda each: mean_log_error(halves["calibration"], fitted=each), start=fitted)
        print("\n".join(f"    {name}: float = {value:.3g}" for name, value in asdict(fitted).items()))
    print(f"{'source':41}{'model':20}{'GPUs':>5}{'published':>10}{'predicted':>10}{'error':>8}  parts of the step")
    for name, half in halves.items():
        print(name)
        print_table(half, fitted=fitted)
    for name, half in halves.items():
        errors = [abs(error(case, fitted=fitted)) for case in half]
        print(f"{name}: {len(half)} rows, median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
