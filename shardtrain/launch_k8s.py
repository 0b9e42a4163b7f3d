"""A run as a Kubernetes JobSet.

Owns: the manifest. Does not own: the cluster, the image, the volume. The manifest is for JobSet's
API v1alpha2, whose controller has to be in the cluster; it gives pods names that others can find.

The config travels in the manifest, with the flags put in. Its relative paths lie on the volume that
all pods share, which is their current folder.
"""

from typing import Any, Final

import yaml

from shardtrain.config import resolve_mesh, to_toml
from shardtrain.errors import ConfigError
from shardtrain.launch_ending import RESTARTS
from shardtrain.launch_job import Job, LaunchOptions, check_devices, need_processes, write_text
from shardtrain.launch_local import say
from shardtrain.sharding.processes import COORDINATOR, PROCESS, PROCESSES

USES: Final = frozenset(["processes", "restarts", "gpus", "out", "image", "claim", "namespace"])
_PORT: Final = 15700
_WORKERS: Final = "workers"
_VOLUME: Final = "/volume"
_CONFIG: Final = "/etc/shardtrain"
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_SAVE_SECONDS: Final = 120
"""What a pod has between SIGTERM and SIGKILL."""
_FINAL: Final = [2, 3, 70, 130]
"""Codes after which another start would end in the same way, or is not wanted."""


class _Text(str):
    """A text that is written as lines."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Writes no anchors, and `_Text` as a block."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


_Dumper.add_representer(
    _Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)


def launch_k8s(job: Job, options: LaunchOptions) -> int:
    """Write the manifest of a job.

    Args:
        job: What is run.
        options: Pods, image and volume.

    Returns:
        0.

    Raises:
        ConfigError: Something that the manifest needs is missing, or it cannot be written.
    """
    count = need_processes(options)
    for name, what in (("image", "a container image"), ("claim", "a persistent volume claim")):
        value = getattr(options, name)
        if not value or value.split() != [value]:
            raise ConfigError(
                f"{what} is needed" if not value else "must be one word",
                where=f"--{name}",
                value=value,
                cure=f"add --{name} NAME",
            )
    if options.gpus:
        resolve_mesh(job.config, count * options.gpus)
    elif job.config.run.cpu_devices:
        check_devices(job.config, count)
    text = manifest(job, options)
    if options.out:
        write_text(options.out, text)
        say(f"wrote {options.out}; kubectl apply -f {options.out}")
    else:
        print(text, end="")
    return 0


def manifest(job: Job, options: LaunchOptions) -> str:
    """Return the manifest of a job.

    Args:
        job: What is run.
        options: Pods, image and volume.

    Returns:
        Two YAML documents: a ConfigMap with the config, and the JobSet.
    """
    place = {"namespace": options.namespace} if options.namespace else {}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.name}-config", **place},
        "data": {"config.toml": _Text(to_toml(job.config))},
    }
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, **place},
        "spec": _spec(job, options),
    }
    text: str = yaml.dump_all([config, jobset], Dumper=_Dumper, sort_keys=False, width=100)
    return text


def _spec(job: Job, options: LaunchOptions) -> dict[str, Any]:
    count = options.processes
    return {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "coordinator": {"replicatedJob": _WORKERS, "jobIndex": 0, "podIndex": 0},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [_WORKERS]},
        "failurePolicy": _failure_policy(options),
        "replicatedJobs": [
            {
                "name": _WORKERS,
                "replicas": 1,
                "template": {
                    "spec": {
                        "completionMode": "Indexed",
                        "parallelism": count,
                        "completions": count,
                        "backoffLimit": 0,
                        "podFailurePolicy": {"rules": _rules()},
                        "template": {"spec": _pod(job, options)},
                    }
                },
            }
        ],
    }


def _failure_policy(options: LaunchOptions) -> dict[str, Any]:
    """All pods start again, once the old ones are gone, unless the Job's own rules made it fail."""
    restarts = RESTARTS if options.restarts < 0 else options.restarts
    return {
        "maxRestarts": restarts,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {
                "name": "final",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }


def _rules() -> list[dict[str, Any]]:
    """What the end of a pod means for the Job; by `backoffLimit: 0` all else fails it as well.

    Only a failure by these rules is final for the JobSet, so 75, 76, 124 and a pod that was killed
    or moved lead to another start.
    """
    codes = {"containerName": "train", "operator": "In", "values": _FINAL}
    return [{"action": "FailJob", "onExitCodes": codes}]


def _pod(job: Job, options: LaunchOptions) -> dict[str, Any]:
    first = f"{job.name}-{_WORKERS}-0-0.{job.name}"
    container: dict[str, Any] = {
        "name": "train",
        "image": options.image,
        "command": ["python", "-m", "shardtrain", "train", f"{_CONFIG}/config.toml"],
        "workingDir": _VOLUME,
        "env": [
            {"name": COORDINATOR, "value": f"{first}:{_PORT}"},
            {"name": PROCESSES, "value": str(options.processes)},
            {"name": PROCESS, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "ports": [{"name": "coordinator", "containerPort": _PORT}],
        "volumeMounts": [
            {"name": "volume", "mountPath": _VOLUME},
            {"name": "config", "mountPath": _CONFIG, "readOnly": True},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if options.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": options.gpus}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SAVE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "config", "configMap": {"name": f"{job.name}-config"}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
