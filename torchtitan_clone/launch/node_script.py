"""The shell script that trains on each node of a run whose nodes start it: those of Kubernetes and of SkyPilot.

It contains the options of the run, so that it needs no file of the machine that submits it.
"""

from collections.abc import Mapping
from dataclasses import replace

from torchtitan_clone.config import Config, to_toml
from torchtitan_clone.launch.slurm_script import processes_per_node
from torchtitan_clone.run.stopping import REQUEUE_EXIT_CODE

END = "END_OF_OPTIONS"
"""No line of TOML that this package writes."""


def node_script(config: Config, *, place: Mapping[str, str]) -> str:
    """Returns a script of sh, whose process becomes that of training: signals reach it, and its exit code remains.

    `place` has NNODES, NODE_RANK and MASTER_ADDR as the shell expands them from the launcher's own variables. The exit
    code is 75 for "start again", and 2 if the configuration is invalid or launch.setup fails.
    """
    launch, preemption = config.launch, config.preemption
    deadline = preemption.deadline_seconds or launch.grace_seconds
    config = replace(config, preemption=replace(preemption, requeue=True, deadline_seconds=deadline))
    lines = ["set -e", f"export NGPU={processes_per_node(launch)}"]
    lines += [f'export {name}="{value}"' for name, value in place.items()]
    if launch.setup:
        lines += ["trap 'echo error: launch.setup failed >&2; exit 2' EXIT", *launch.setup, "trap - EXIT"]
    lines += ['options="$(mktemp -d)/run.toml"', f"cat >\"$options\" <<'{END}'", to_toml(config).rstrip("\n"), END]
    if launch.nodes > 1:  # a first process ignores signals that have no trap
        lines.append(f"trap 'exit {REQUEUE_EXIT_CODE}' TERM")
        lines.append('until getent hosts "$MASTER_ADDR" >/dev/null; do sleep 1; done')
        lines.append("trap - TERM")
    return "\n".join([*lines, 'exec torchtitan_clone train "$options"', ""])
