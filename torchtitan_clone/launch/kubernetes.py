"""Manifests of a run for Kubernetes: an indexed Job with what it needs, or a TrainJob of Kubeflow Trainer.

- An *indexed Job* has one pod per node, whose index is NODE_RANK, and a *headless service* that gives each pod a name.
- A *TrainJob* names a runtime of the cluster, by default torch-distributed, which Kubeflow completes to a JobSet.
"""

import re

from torchtitan_clone.config import Config, run_folder
from torchtitan_clone.config.checks import seconds_of
from torchtitan_clone.config.schema_cluster import Cluster
from torchtitan_clone.launch.node_script import node_script
from torchtitan_clone.launch.torchrun import CONFIG_ERROR
from torchtitan_clone.run.stopping import REQUEUE_EXIT_CODE

Object = dict[str, object]
"""An object of Kubernetes, as in its JSON."""
GPU = "nvidia.com/gpu"
PORT = 29500
MAX_NAME = 50
"""Characters of a name: that of a pod, which has at most 63, ends with its index and five more."""
RUN = "torchtitan-clone/run"
"""The label of the pods of a run."""


def name_of(config: Config) -> str:
    """Returns the name of a run's objects: that of the run, with the characters that Kubernetes allows."""
    text = re.sub("[^a-z0-9]+", "-", run_folder(config.job).name.lower()).strip("-")
    return text[:MAX_NAME].strip("-") or "run"


def job_manifests(config: Config) -> list[Object]:
    """Returns the objects of an indexed Job: the service of its pods, who may reach them, and the Job."""
    launch, name = config.launch, name_of(config)
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    place = {"NNODES": str(launch.nodes), "MASTER_ADDR": f"{name}-0.{name}", "MASTER_PORT": str(PORT)}
    script = node_script(config, place=place if launch.nodes > 1 else {})
    container: Object = {
        "name": "train",
        "image": launch.image,
        "command": ["/bin/sh", "-c", script],
        "env": [{"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}}, *_environment(launch)],
        "resources": _resources(launch),
        "volumeMounts": _mounts(launch),
    }
    pod: Object = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": launch.grace_seconds,
        "containers": [container],
        "volumes": _volumes(launch),
    }
    selector: Object = {"matchLabels": {RUN: name}}
    job: Object = {
        "completionMode": "Indexed",
        "completions": launch.nodes,
        "parallelism": launch.nodes,
        "backoffLimit": launch.max_starts_without_progress * launch.nodes,
        "podFailurePolicy": {"rules": _rules()},
        "template": {"metadata": {"labels": {RUN: name}}, "spec": pod},
    }
    if seconds := seconds_of(launch.time):
        job["activeDeadlineSeconds"] = seconds
    service: Object = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {RUN: name}}
    ingress = [{"from": [{"podSelector": selector}]}]
    policy: Object = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
    return [
        _object("v1", "Service", name=name, spec=service | {"ports": [{"name": "rendezvous", "port": PORT}]}),
        _object("networking.k8s.io/v1", "NetworkPolicy", name=name, spec=policy),
        _object("batch/v1", "Job", name=name, spec=job),
    ]


def train_job_manifests(config: Config, *, runtime: str) -> list[Object]:
    """Returns the TrainJob, which has the variables of torchrun; what starts its pods again is the runtime's."""
    launch = config.launch
    names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    script = node_script(config, place={name: f"$PET_{name}" for name in names})
    trainer: Object = {
        "image": launch.image,
        "command": ["/bin/sh", "-c", script],
        "numNodes": launch.nodes,
        "numProcPerNode": 1,  # the script starts those of its node
        "env": _environment(launch),
        "resourcesPerNode": _resources(launch),
    }
    pod: Object = {
        "terminationGracePeriodSeconds": launch.grace_seconds,
        "containers": [{"name": "node", "volumeMounts": _mounts(launch)}],
        "volumes": _volumes(launch),
    }
    node: Object = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch: Object = {
        "manager": "torchtitan-clone.io/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
    }
    spec: Object = {"runtimeRef": {"name": runtime}, "trainer": trainer, "runtimePatches": [patch]}
    if seconds := seconds_of(launch.time):
        spec["activeDeadlineSeconds"] = seconds
    return [_object("trainer.kubeflow.org/v1alpha1", "TrainJob", name=name_of(config), spec=spec)]


def _object(version: str, kind: str, *, name: str, spec: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _rules() -> list[Object]:
    """Returns what follows the end of a pod: an invalid run ends; one that saved, or was evicted, is no failure."""

    def codes(*values: int) -> Object:
        return {"onExitCodes": {"containerName": "train", "operator": "In", "values": [*values]}}

    evicted: Object = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [
        {"action": "FailJob", **codes(CONFIG_ERROR)},
        {"action": "Ignore", **codes(REQUEUE_EXIT_CODE)},
        {"action": "Ignore", **evicted},
    ]


def _environment(launch: Cluster) -> list[Object]:
    values: list[Object] = [{"name": name, "value": str(value)} for name, value in launch.environment.items()]
    for name, reference in launch.secrets.items():
        secret, _, key = reference.partition("/")
        values.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return values


def _resources(launch: Cluster) -> Object:
    requests = {"cpu": str(launch.cpus_per_node)} if launch.cpus_per_node else {}
    limits = {GPU: str(launch.gpus_per_node)} if launch.gpus_per_node else {}
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def _volumes(launch: Cluster) -> list[Object]:
    memory: Object = {"medium": "Memory", "sizeLimit": f"{launch.shared_memory_gib}Gi"}
    sources = [{"persistentVolumeClaim": {"claimName": claim}} for claim in launch.volumes.values()]
    claims: list[Object] = [{"name": f"volume-{i}", **source} for i, source in enumerate(sources)]
    return [{"name": "shared-memory", "emptyDir": memory}, *claims]


def _mounts(launch: Cluster) -> list[Object]:
    claims: list[Object] = [{"name": f"volume-{i}", "mountPath": path} for i, path in enumerate(launch.volumes)]
    return [{"name": "shared-memory", "mountPath": "/dev/shm"}, *claims]
