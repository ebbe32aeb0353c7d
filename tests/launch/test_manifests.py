"""Runs for Kubernetes, Kubeflow and SkyPilot: what is written fits their published interfaces, and trains."""

import contextlib
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.launch.slurm_cluster import free_ports
from tests.support.runs import options
from torchtitan_clone.commands import kubernetes, skypilot
from torchtitan_clone.config import load_config
from torchtitan_clone.launch.kubernetes import name_of
from torchtitan_clone.launch.node_script import END

ROOT = Path(__file__).parents[2]
CLUSTER = {
    "launch__nodes": 2, "launch__gpus_per_node": 4, "launch__image": "registry.example/titan:1",
    "launch__time": "1-12:00:00", "launch__cpus_per_node": 32, "launch__shared_memory_gib": 8,
    "launch__volumes": '{"/data" = "claim"}', "launch__secrets": '{HF_TOKEN = "hub/token"}',
    "launch__environment": '{NCCL_DEBUG = "WARN", COUNT = 3}', "job__dump_folder": "/data/outputs",
    "launch__setup": '["ulimit -l unlimited"]',
}  # fmt: skip


def written(command, capsys, tmp_path, *words, **changes):
    """Returns the documents that a command prints."""
    (tmp_path / "empty.toml").write_text("")
    argv = options(tmp_path / "corpus", tmp_path, job__config_file=tmp_path / "empty.toml", **(CLUSTER | changes))
    code = command.main([*words, *argv, "--dry-run"])
    answer = capsys.readouterr()
    assert code == 0, answer.err
    return list(yaml.safe_load_all(answer.out))


def test_an_indexed_job(capsys, tmp_path):
    service, policy, job = written(kubernetes, capsys, tmp_path, job__run_name="My run_1")
    assert [each["kind"] for each in (service, policy, job)] == ["Service", "NetworkPolicy", "Job"]
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (spec["activeDeadlineSeconds"], spec["backoffLimit"]) == (36 * 3600, 6)
    rules = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"][:2]}
    assert {action: rule["onExitCodes"]["values"] for action, rule in rules.items()} == {"FailJob": [2], "Ignore": [75]}
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 120)
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}, "requests": {"cpu": "32"}}
    environment = {each["name"]: each.get("value") or each["valueFrom"] for each in container["env"]}
    assert environment.pop("NODE_RANK")["fieldRef"]["fieldPath"].endswith("job-completion-index']")
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert environment == {"NCCL_DEBUG": "WARN", "COUNT": "3", "HF_TOKEN": secret}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/data"}
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    selector = service["spec"]["selector"]
    assert selector == spec["template"]["metadata"]["labels"] == policy["spec"]["podSelector"]["matchLabels"]
    name = job["metadata"]["name"]
    assert pod["subdomain"] == service["metadata"]["name"] == name == "my-run-1"
    script = container["command"][2]
    assert f'export MASTER_ADDR="{name}-0.{name}"' in script
    assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0


def test_the_options_of_a_node_are_those_of_the_run(capsys, tmp_path):
    text = '"it\'s $HOME `id`"'
    _, _, job = written(kubernetes, capsys, tmp_path, training__steps=77, job__description=text)
    script = job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    (tmp_path / "run.toml").write_text(script.partition(f"<<'{END}'\n")[2].partition(f"\n{END}\n")[0])
    config = load_config([f"--job.config_file={tmp_path / 'run.toml'}"])
    assert (config.training.steps, config.job.description) == (77, "it's $HOME `id`")
    assert (config.preemption.requeue, config.preemption.deadline_seconds) == (True, 120)
    assert not config.job.dry_run


def test_one_node_has_no_rendezvous_and_no_limit(capsys, tmp_path):
    changes = {"launch__nodes": 1, "launch__time": None, "launch__secrets": "{}"}
    _, _, job = written(kubernetes, capsys, tmp_path, **changes)
    assert "activeDeadlineSeconds" not in job["spec"]
    assert "MASTER_ADDR" not in yaml.safe_dump(job)


def model_of(document, kind):
    """Returns the model of a document, or its value; ValueError for what its kind does not allow.

    The library itself reads documents without a word about names that it does not know.
    """
    from kubernetes.client import models

    if match := re.fullmatch(r"list\[(.*)\]", kind):
        return [model_of(each, match[1]) for each in document]
    if match := re.fullmatch(r"dict\[str, (.*)\]", kind):
        return {name: model_of(value, match[1]) for name, value in document.items()}
    if kind in ("object", "str", "int", "bool", "float", "datetime"):
        if kind in ("str", "int", "bool") and type(document).__name__ != kind:
            raise ValueError(f"{document!r} is not of {kind}")
        return document
    model = getattr(models, kind)
    names = {name: field for field, name in model.attribute_map.items()}
    if unknown := document.keys() - names.keys():
        raise ValueError(f"{kind} has no {unknown}")
    return model(**{names[name]: model_of(value, model.openapi_types[names[name]]) for name, value in document.items()})


@pytest.mark.skipif(not importlib.util.find_spec("kubernetes"), reason="the Python client of Kubernetes is missing")
@pytest.mark.parametrize("nodes", [1, 2])
def test_manifests_fit_the_models_of_kubernetes(capsys, tmp_path, nodes):
    for document in written(kubernetes, capsys, tmp_path, launch__nodes=nodes):
        assert model_of(document, f"V1{document['kind']}").metadata.name == "run"
    pod = document["spec"]["template"]["spec"]
    for change, message in (
        ({"restartPolicie": "Never"}, "V1PodSpec has no .*restartPolicie"),
        ({"containers": [{"image": "a"}]}, "`name`, must not be `None`"),
        ({"terminationGracePeriodSeconds": "9"}, "not of int"),
    ):
        wrong = document | {"spec": document["spec"] | {"template": {"spec": pod | change}}}
        with pytest.raises(ValueError, match=message):
            model_of(wrong, "V1Job")


@pytest.mark.skipif(not importlib.util.find_spec("kubeflow_trainer_api"), reason="the models of Kubeflow are missing")
def test_a_train_job_fits_the_models_of_kubeflow(capsys, tmp_path):
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    (document,) = written(kubernetes, capsys, tmp_path, "--kind=trainjob")
    assert TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document  # which leaves out what it does not know
    script = document["spec"]["trainer"]["command"][2]
    assert 'export NODE_RANK="$PET_NODE_RANK"' in script


def test_a_task_of_skypilot(capsys, tmp_path):
    (document,) = written(skypilot, capsys, tmp_path)
    assert (document["num_nodes"], document["resources"]["accelerators"]) == (2, "H100:4")
    assert document["resources"]["job_recovery"] == {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]}
    assert (document["secrets"], document["volumes"]) == ({"HF_TOKEN": None}, {"/data": "claim"})
    assert document["envs"] == {"NCCL_DEBUG": "WARN", "COUNT": "3"}
    place = document["run"].partition("mktemp")[0]
    shown = 'echo "$NNODES $NODE_RANK $MASTER_ADDR"'
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    exports = "\n".join(line for line in place.splitlines() if line.startswith("export"))
    answer = subprocess.run(
        ["sh", "-c", f"{exports}\n{shown}"], env=os.environ | sky, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "2 1 10.0.0.1\n"


@pytest.mark.skipif(not importlib.util.find_spec("sky"), reason="SkyPilot is missing")
def test_a_task_fits_the_parser_of_skypilot(capsys, tmp_path, monkeypatch):
    import sky

    monkeypatch.setenv("HF_TOKEN", "x")
    (document,) = written(skypilot, capsys, tmp_path, launch__volumes="{}", checkpoint__folder="s3://bucket/run")
    task = sky.Task.from_yaml_config(document, secrets_overrides=[("HF_TOKEN", "x")])
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators) == (2, {"H100": 4})
    assert resources.job_recovery["recover_on_exit_codes"] == [75]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"launch__image": None}, "launch.image is not set"),
        ({"job__dump_folder": "outputs"}, 'job.dump_folder = "outputs": is in no volume of launch.volumes'),
        ({"launch__secrets": '{HF_TOKEN = "hf_abcdefg"}'}, "launch.secrets.HF_TOKEN: must be the name of a secret"),
        ({"launch__volumes": '{"data" = "claim"}'}, 'launch.volumes: "data" = "claim": must be an absolute path'),
        ({"parallelism__tensor_parallel_degree": 3}, "parallelism: tensor 3"),
        ({"launch__time": "soon"}, 'launch.time = "soon": not in Slurm\'s format'),
        ({"fault_tolerance__enable": True}, "fault_tolerance.enable = true: replica groups"),
    ],
)
def test_what_is_wrong_is_an_error_before_anything_is_written(capsys, tmp_path, changes, complaint):
    argv = options(tmp_path / "corpus", tmp_path, **(CLUSTER | changes))
    file = tmp_path / "out.yaml"
    assert kubernetes.main([*argv, f"--output={file}"]) == 2
    assert complaint in capsys.readouterr().err
    assert not file.exists()


def test_the_file_and_the_command_that_submits_it(capsys, tmp_path):
    argv = options(tmp_path / "corpus", tmp_path, **CLUSTER)
    file = tmp_path / "out.yaml"
    assert skypilot.main([*argv, f"--output={file}"]) == 0
    assert capsys.readouterr().out == f"wrote {file}; submit it by: sky jobs launch --secret HF_TOKEN {file}\n"
    assert yaml.safe_load(file.read_text())["name"] == "run"


def test_names_are_those_that_kubernetes_allows():
    for name, expected in (("A_b", "a-b"), ("--", "run"), ("x" * 80, "x" * 50), ("Größe 1.5", "gr-e-1-5")):
        assert name_of(load_config([f"--job.run_name={name}"])) == expected


@contextlib.contextmanager
def pods(job, folder, *, python):
    """Starts the container of each index on this machine, where a name for the first pod is 127.0.0.1."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    program = folder / "bin" / "torchtitan_clone"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(str(python))} -m torchtitan_clone "$@"\n')
    program.chmod(0o755)
    name, port = job["metadata"]["name"], free_ports(1)
    script = container["command"][2].replace(f"{name}-0.{name}", "127.0.0.1").replace("29500", str(port))
    common = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "CONFIG_FILE")}
    started = []
    for index in range(job["spec"]["completions"]):
        own = {"NODE_RANK": str(index)}
        started.append(
            subprocess.Popen(
                [*container["command"][:2], script], env=inherited | common | own, cwd=folder, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_two_pods_train_save_on_sigterm_and_are_told_to_start_again(capsys, corpus, tmp_path, python):
    changes = {
        "launch__gpus_per_node": 0, "launch__cpus_per_node": None, "launch__volumes": f'{{"{tmp_path}" = "claim"}}',
        "job__dump_folder": tmp_path, "training__dataset_path": corpus, "data__cache_folder": corpus.parent / "cache",
        "training__steps": 100_000, "training__global_batch_size": 8, "checkpoint__interval": 100_000,
        "launch__setup": '["export SET_UP=1"]',
    }  # fmt: skip
    _, _, job = written(kubernetes, capsys, tmp_path, **changes)
    with pods(job, tmp_path, python=python) as (first, second):
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count('"loss"') > 2):
            assert first.poll() is second.poll() is None, second.communicate()[0]
            time.sleep(0.1)
        second.send_signal(signal.SIGTERM)  # as the node of this pod is drained
        outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
        assert [process.returncode for process in (first, second)] == [75, 75], outputs
    assert len([*(tmp_path / "run" / "checkpoint").glob("step-*")]) == 1
