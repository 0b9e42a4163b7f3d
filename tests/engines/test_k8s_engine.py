"""`launch --engine k8s`: every field of the manifest, held against the names of the API."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardtrain import cli, load_config

FIELDS: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str},
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str},
        "coordinator": {"replicatedJob": str, "jobIndex": int, "podIndex": int},
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": str,
            "rules": [{"name": str, "action": str, "onJobFailureReasons": [str]}],
        },
        "replicatedJobs": [
            {
                "name": str,
                "replicas": int,
                "template": {
                    "spec": {
                        "completionMode": str,
                        "parallelism": int,
                        "completions": int,
                        "backoffLimit": int,
                        "podFailurePolicy": {
                            "rules": [
                                {
                                    "action": str,
                                    "onExitCodes": {
                                        "containerName": str,
                                        "operator": str,
                                        "values": [int],
                                    },
                                }
                            ]
                        },
                        "template": {
                            "spec": {
                                "restartPolicy": str,
                                "terminationGracePeriodSeconds": int,
                                "containers": [
                                    {
                                        "name": str,
                                        "image": str,
                                        "command": [str],
                                        "workingDir": str,
                                        "env": [
                                            {
                                                "name": str,
                                                "value": str,
                                                "valueFrom": {"fieldRef": {"fieldPath": str}},
                                            }
                                        ],
                                        "ports": [{"name": str, "containerPort": int}],
                                        "volumeMounts": [
                                            {"name": str, "mountPath": str, "readOnly": bool}
                                        ],
                                        "resources": {"limits": {"nvidia.com/gpu": int}},
                                    }
                                ],
                                "volumes": [
                                    {
                                        "name": str,
                                        "persistentVolumeClaim": {"claimName": str},
                                        "configMap": {"name": str},
                                        "emptyDir": {"medium": str},
                                    }
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}
"""JobSet v1alpha2, batch/v1 Job and core/v1 Pod, as far as the manifest goes."""


def unknown(value: Any, fields: Any, path: str = "") -> list[str]:
    """The places of a manifest that the API has not, or has as another type."""
    if isinstance(fields, dict):
        if not isinstance(value, dict):
            return [path]
        return [
            fault
            for key, inner in value.items()
            for fault in (
                unknown(inner, fields[key], f"{path}.{key}") if key in fields else [f"{path}.{key}"]
            )
        ]
    if isinstance(fields, list):
        if not isinstance(value, list):
            return [path]
        return [fault for inner in value for fault in unknown(inner, fields[0], f"{path}[]")]
    return [] if type(value) is fields else [path]


def written(folder: Path, *words: str) -> list[dict[str, Any]]:
    out = folder / "job.yaml"
    base = ["launch", "--engine", "k8s", "quickstart", "-n", "4", "--image", "me/train:1"]
    assert cli.main([*base, "--claim", "disk", "--out", str(out), *words]) == 0
    return list(yaml.safe_load_all(out.read_text()))


def test_every_field_is_one_of_the_api(tmp_path: Path) -> None:
    _, jobset = written(tmp_path, "--gpus", "8", "--namespace", "me", "--mesh.tensor", "4")
    assert unknown(jobset, FIELDS) == []
    assert unknown({"spec": {"jobs": 1}}, FIELDS) == [".spec.jobs"]
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["metadata"] == {"name": "quickstart", "namespace": "me"}


def test_peers_find_each_other(tmp_path: Path) -> None:
    _, jobset = written(tmp_path)
    spec = jobset["spec"]
    (job,) = spec["replicatedJobs"]
    inner = job["template"]["spec"]
    assert (inner["parallelism"], inner["completions"]) == (4, 4)
    assert inner["completionMode"] == "Indexed"
    (container,) = inner["template"]["spec"]["containers"]
    env = {row["name"]: row for row in container["env"]}
    host, port = env["SHARDTRAIN_COORDINATOR"]["value"].split(":")
    # JobSet's name of a pod: of the JobSet, the replicated job, its index, the pod's index
    coordinator = spec["coordinator"]
    name = f"quickstart-{coordinator['replicatedJob']}-{coordinator['jobIndex']}"
    assert host == f"{name}-{coordinator['podIndex']}.{spec['network']['subdomain']}"
    assert coordinator["replicatedJob"] == job["name"]
    assert container["ports"] == [{"name": "coordinator", "containerPort": int(port)}]
    assert env["SHARDTRAIN_PROCESSES"]["value"] == "4"
    index = env["SHARDTRAIN_PROCESS"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert "resources" not in container


def test_what_starts_again(tmp_path: Path) -> None:
    _, jobset = written(tmp_path, "--restarts", "3")
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    inner = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert inner["backoffLimit"] == 0
    (rule,) = inner["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert set(rule["onExitCodes"]["values"]) & {75, 76, 124} == set()
    assert set(rule["onExitCodes"]["values"]) == {2, 3, 70, 130}
    assert inner["template"]["spec"]["restartPolicy"] == "Never"  # as podFailurePolicy demands


def test_the_config_travels_with_it(tmp_path: Path) -> None:
    config_map, jobset = written(tmp_path, "--run.steps", "7")
    assert (config_map["apiVersion"], config_map["kind"]) == ("v1", "ConfigMap")
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["config"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert volumes["volume"]["persistentVolumeClaim"]["claimName"] == "disk"
    assert pod["containers"][0]["workingDir"] == mounts["volume"]
    (file,) = config_map["data"]
    assert pod["containers"][0]["command"][-1] == f"{mounts['config']}/{file}"
    (tmp_path / file).write_text(config_map["data"][file])
    expected = load_config("quickstart", {"run.steps": 7})
    assert load_config(tmp_path / file) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--claim", "c", "-n", "2"), "--image: a container image is needed\n  to do: add --image"),
        (("--image", "i", "-n", "2"), "--claim: a persistent volume claim is needed"),
        (("--image", "i", "--claim", "a b", "-n", "2"), "--claim: must be one word"),
        (("--image", "i", "--claim", "c"), "how many processes"),
        (
            ("--image", "i", "--claim", "c", "-n", "2", "--gpus", "3"),
            "not divisible by mesh.data=3",
        ),
        (("--image", "i", "--claim", "c", "-n", "2", "--submit"), "--submit: .* has no use for it"),
        (("--image", "i", "--claim", "c", "-n", "2", "--out", "/no/x"), "--out: cannot be written"),
    ],
)
def test_refusals(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--engine", "k8s", *words]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert re.search(message, error), error
