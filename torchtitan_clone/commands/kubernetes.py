"""Writes a run for Kubernetes, with the same options as run_train.sh and those of [launch].

    python scripts/launch/kubernetes.py --job.config_file=FILE --launch.nodes=4 --launch.image=IMAGE --dry-run
    python scripts/launch/kubernetes.py --job.config_file=FILE --kind=trainjob --output=my_run.yaml

--dry-run prints the manifest. Without it the manifest is written to --output, by default kubernetes.yaml, for
`kubectl apply`. --kind=job is an indexed Job of Kubernetes, trainjob one of Kubeflow Trainer (2.2 or newer).
"""

from pathlib import Path

from torchtitan_clone.commands.manifests import check_for_containers, write_yaml
from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import ConfigError, load_run_config
from torchtitan_clone.config.started import DEFAULT_CONFIG
from torchtitan_clone.launch.kubernetes import job_manifests, train_job_manifests
from torchtitan_clone.observe.outputs import reports_errors


@reports_errors
def main(words: list[str]) -> int:
    """Prints or writes the manifest; returns exit code 2 for an invalid configuration."""
    parser = build_parser(__doc__)
    parser.add_argument("--kind", choices=["job", "trainjob"], default="job")
    parser.add_argument("--runtime", default="torch-distributed", help="of a TrainJob: name of the cluster's runtime")
    parser.add_argument("--output", type=Path, default=Path("kubernetes.yaml"), help="file to write")
    options, words = parser.parse_known_args(words)
    config = load_run_config(words, default=str(DEFAULT_CONFIG))
    check_for_containers(config)
    if not config.launch.image:
        raise ConfigError("launch.image is not set: pods need an image that has the command torchtitan_clone; set it")
    is_job = options.kind == "job"
    documents = job_manifests(config) if is_job else train_job_manifests(config, runtime=options.runtime)
    write_yaml(documents, file=options.output, command="kubectl apply -f", prints=config.job.dry_run)
    return 0
