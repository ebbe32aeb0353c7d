"""A task of SkyPilot for a run."""

from torchtitan_clone.config import Config
from torchtitan_clone.launch.kubernetes import Object, name_of
from torchtitan_clone.launch.node_script import node_script
from torchtitan_clone.run.stopping import REQUEUE_EXIT_CODE

PLACE = {
    "NNODES": "$SKYPILOT_NUM_NODES",
    "NODE_RANK": "$SKYPILOT_NODE_RANK",
    "MASTER_ADDR": '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
}


def task(config: Config) -> Object:
    """Returns the task; as a managed job it is started again after exit code 75, and a few times after others."""
    launch = config.launch
    retries = launch.max_starts_without_progress
    resources: Object = {
        "job_recovery": {"max_restarts_on_errors": retries, "recover_on_exit_codes": [REQUEUE_EXIT_CODE]}
    }
    if launch.gpus_per_node:
        resources["accelerators"] = f"{launch.accelerator}:{launch.gpus_per_node}"
    if launch.cpus_per_node:
        resources["cpus"] = f"{launch.cpus_per_node}+"
    if launch.image:
        resources["image_id"] = f"docker:{launch.image}"
    optional: Object = {
        "envs": {name: str(value) for name, value in launch.environment.items()},
        "secrets": dict.fromkeys(launch.secrets),
        "volumes": dict(launch.volumes),
    }
    given = {name: values for name, values in optional.items() if values}
    head: Object = {"name": name_of(config), "num_nodes": launch.nodes, "resources": resources}
    return head | given | {"run": node_script(config, place=PLACE if launch.nodes > 1 else {})}
