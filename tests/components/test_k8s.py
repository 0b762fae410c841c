"""The manifests: valid by published schemas, and right where a schema is silent."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftckpt.config import Config
from tests.support.repository import ROOT

MANIFESTS = sorted((ROOT / "launch" / "k8s").glob("*.yaml"))
RELEASES = ("1.29", "1.37")
"""Releases of Kubernetes: the first with sidecars by default, and the newest tested here."""
TORCHRUN_SECS = 30
"""How long torchrun waits for ranks after SIGTERM: its own default."""
SAVE_MORE_SECS = 15
"""The time that ``job.sh`` adds to a save, and that an SMP needs to end (at most 20 s)."""
Json = dict[str, Any]


def load(path: Path) -> Json:
    manifest: Json = yaml.safe_load(path.read_text())
    return manifest


def template_of(manifest: Json) -> Json:
    """That of all pods."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        found = [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
    else:
        found = [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
    assert all(one == found[0] for one in found)
    template: Json = found[0]
    return template


OF_PODS = pytest.mark.parametrize("path", MANIFESTS, ids=[path.stem for path in MANIFESTS])


def spec_of(path: Path) -> Json:
    spec: Json = template_of(load(path))["spec"]
    return spec


def problems(resource: Json, release: str) -> str:
    """The complaint of a release's schemas about a core resource, or "". An unknown resource is a complaint."""
    validate = importlib.import_module("kubernetes_validate")
    try:
        validate.validate(resource, release, strict=True)
    except (validate.ValidationError, validate.SchemaNotFoundError) as error:
        return str(getattr(error, "message", error)) or type(error).__name__
    return ""


@pytest.mark.parametrize("release", RELEASES)
@OF_PODS
def test_the_pods_are_valid(path: Path, release: str) -> None:
    template = template_of(load(path))
    spec = {"restartPolicy": "OnFailure", **template["spec"]}  # as the operator sets it
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "run1", **template["metadata"]}, "spec": spec}
    assert problems(pod, release) == ""


@pytest.mark.parametrize("release", RELEASES)
def test_the_jobs_of_the_jobset_are_valid(release: str) -> None:
    (job,) = load(ROOT / "launch/k8s/jobset.yaml")["spec"]["replicatedJobs"]
    resource = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "run1"}, **job["template"]}
    assert problems(resource, release) == ""


def test_the_jobset_is_one() -> None:
    """Checks with the models of Kubeflow's trainer, made of the resource's schema: types, and names by a round
    trip."""
    models = importlib.import_module("kubeflow_trainer_api.models")
    manifest = load(ROOT / "launch/k8s/jobset.yaml")
    (job,) = manifest["spec"]["replicatedJobs"]
    template = job["template"].pop("spec")  # the test above has that
    job["template"]["spec"] = {"template": {"spec": {"containers": template["template"]["spec"]["containers"][:0]}}}
    model = models.JobsetV1alpha2JobSet.from_dict(json.loads(json.dumps(manifest)))
    assert differences(manifest, model.to_dict()) == []


def test_the_pytorchjob_is_one() -> None:
    """Checks with the models of Kubeflow's training operator: required fields, and names by a round trip."""
    training = importlib.import_module("kubeflow.training")
    manifest = load(ROOT / "launch/k8s/pytorchjob.yaml")
    reply = type("Reply", (), {"data": json.dumps(manifest)})
    client = training.ApiClient()
    model = client.deserialize(reply, "KubeflowOrgV1PyTorchJob")
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        del replica["template"]  # of the core, which the tests above have
    assert differences(manifest, client.sanitize_for_serialization(model)) == []


def differences(wanted: Any, got: Any, where: str = "") -> list[str]:
    """The parts of ``wanted`` that are missing in ``got``."""
    if isinstance(wanted, dict):
        inside = got if isinstance(got, dict) else {}
        return [one for name in wanted for one in differences(wanted[name], inside.get(name), f"{where}.{name}")]
    if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        return [one for a, b in zip(wanted, got, strict=True) for one in differences(a, b, f"{where}[]")]
    return [] if wanted == got else [f"{where}: {wanted!r}, not {got!r}"]


# what no schema says


@OF_PODS
def test_the_smp_outlives_trainers_and_has_their_memory(path: Path) -> None:
    spec = spec_of(path)
    (smp,), (trainers,) = spec["initContainers"], spec["containers"]
    assert smp["restartPolicy"] == "Always" and smp["command"] == ["bash", "launch/smp_pod.sh"]
    assert spec["shareProcessNamespace"] is True
    job, arena = smp["args"]
    assert trainers["args"][:2] == ["--job", job] and arena == Config().arena
    assert not [word for word in trainers["args"] if word.startswith("--ftckpt-arena")]
    (memory,) = [volume["name"] for volume in spec["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"]
    for container in (smp, trainers):
        assert {"name": memory, "mountPath": arena} in container["volumeMounts"]
    stored = trainers["args"][trainers["args"].index("--ftckpt-persist") + 1]
    for container in (smp, trainers):
        assert [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == stored] == [
            "checkpoints"
        ]


@OF_PODS
def test_the_grace_is_long_enough_for_ranks_to_end_and_for_the_save(path: Path) -> None:
    spec = spec_of(path)
    smp, trainers = settings(spec["initContainers"][0]), settings(spec["containers"][0])
    assert trainers["FTCKPT_SAVE_SECS"] == "0", "trainers would save first, and the SMP again"
    needed = TORCHRUN_SECS + int(smp["FTCKPT_SAVE_SECS"]) + 3 * SAVE_MORE_SECS
    assert spec["terminationGracePeriodSeconds"] >= needed


@OF_PODS
def test_a_probe_asks_for_the_smp_of_this_job_and_leaves_it_time(path: Path) -> None:
    (smp,) = spec_of(path)["initContainers"]
    job, arena = smp["args"]
    assert arena == Config().arena and "readinessProbe" not in smp
    for name in ("startupProbe", "livenessProbe"):
        command = smp[name]["exec"]["command"]
        assert command == ["python3", "-m", "ftckpt.smp", "--alive", "--job", job]
        ran = subprocess.run([sys.executable, *command[1:], "--arena", "/nowhere"], capture_output=True, check=False)
        assert ran.returncode == 1 and b"has no SMP" in ran.stderr
        assert smp[name]["timeoutSeconds"] >= 10, "Python starts slowly where all cores train"
    liveness = smp["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 120, "one that is only slow would be killed"


def settings(container: Json) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def test_nodes_meet_at_the_first_one() -> None:
    jobset = load(ROOT / "launch/k8s/jobset.yaml")
    name, (job,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    words = template_of(jobset)["spec"]["containers"][0]["args"]
    assert words[words.index("--endpoint") + 1] == f"{name}-{job['name']}-0-0.{name}:29400"
    assert jobset["spec"]["network"]["enableDNSHostnames"] and jobset["spec"]["network"]["publishNotReadyAddresses"]
    run = job["template"]["spec"]
    assert run["completionMode"] == "Indexed" and run["parallelism"] == run["completions"]
    assert words[words.index("--nodes") + 1] == str(run["completions"] * job["replicas"])
    pytorch = load(ROOT / "launch/k8s/pytorchjob.yaml")
    replicas = pytorch["spec"]["pytorchReplicaSpecs"]
    words = replicas["Worker"]["template"]["spec"]["containers"][0]["args"]
    assert words[words.index("--endpoint") + 1] == f"{pytorch['metadata']['name']}-master-0:29400"
    assert words[words.index("--nodes") + 1] == str(sum(replica["replicas"] for replica in replicas.values()))
    assert {replica["template"]["spec"]["containers"][0]["name"] for replica in replicas.values()} == {"pytorch"}
