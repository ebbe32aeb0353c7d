"""What the core finds here: `run.describe.Planner`."""

from torchtitan_clone.config import Config
from torchtitan_clone.planner.collective_trace import trace_collectives as trace_collectives
from torchtitan_clone.planner.hardware import named_hardware
from torchtitan_clone.planner.memory_estimate import describe_memory as describe_estimate
from torchtitan_clone.run.plan import RunPlan


def names_hardware(config: Config) -> bool:
    """Returns whether job.dry_run_device names a hardware table; ConfigError for an unknown one."""
    return named_hardware(config) is not None


def describe_memory(plan: RunPlan) -> str:
    """Returns the estimated memory of a rank as a line, with that of the device if it is known and too small."""
    hardware = named_hardware(plan.config)
    return describe_estimate(plan, memory_gib=hardware.memory_gib if hardware else None)


def describe_layouts(plan: RunPlan) -> str:
    """Returns the layout of the weights on several ranks, as lines."""
    from torchtitan_clone.planner import simulate

    return simulate.describe_layouts(plan)


def describe_simulation(plan: RunPlan, *, device_type: str) -> str:
    """Returns the memory of each pipeline rank on this type of device, and the collectives of a step, as lines."""
    from torchtitan_clone.planner.simulate import simulate
    from torchtitan_clone.planner.step_memory import memory_table

    return f"\n{memory_table(plan, device_type=device_type)}\n\n{simulate(plan)}"


def describe_time(plan: RunPlan) -> str:
    """Returns the predicted step time on the hardware that job.dry_run_device names, as lines; "" without any."""
    if (hardware := named_hardware(plan.config)) is None:
        return ""
    from torchtitan_clone.planner.time_model import describe_step_time

    return describe_step_time(plan, hardware=hardware)
