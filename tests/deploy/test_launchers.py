"""The Slurm script and the JobSet: their form, and that mkc takes the commands in them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mkc.cli.lookup import registered_models
from mkc.cli.main import load_command
from mkc.targets import load_target

DEPLOY = Path(__file__).parents[2] / "deploy"
SLURM = DEPLOY / "slurm.sbatch"
JOBSET = DEPLOY / "jobset-k3.yaml"


@pytest.fixture(scope="module")
def jobset() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(JOBSET.read_text())
    return found


@pytest.fixture(scope="module")
def job(jobset: dict[str, Any]) -> dict[str, Any]:
    (only,) = jobset["spec"]["replicatedJobs"]
    found: dict[str, Any] = only["template"]["spec"]
    return found


def parse(arguments: list[str]) -> dict[str, Any]:
    """Values of a command's options as mkc understands them; raises when it does not."""
    name, *options = arguments
    return dict(load_command(name).make_context(name, options).params)


def test_jobset_is_one_of_the_controller(jobset: dict[str, Any]) -> None:
    """Field names and values of jobset.x-k8s.io/v1alpha2."""
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = jobset["spec"]
    assert set(spec) <= {"network", "coordinator", "failurePolicy", "replicatedJobs"}
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    (only,) = spec["replicatedJobs"]
    assert spec["coordinator"] == {"replicatedJob": only["name"], "jobIndex": 0, "podIndex": 0}
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", jobset["metadata"]["name"])


def test_jobset_starts_again_unless_the_request_is_wrong(
    jobset: dict[str, Any], job: dict[str, Any]
) -> None:
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    # A pod failure policy needs pods that are never restarted; one lost pod fails the job.
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    (pod_rule,) = job["podFailurePolicy"]["rules"]
    (container,) = job["template"]["spec"]["containers"]
    assert pod_rule["action"] == "FailJob"
    assert pod_rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }


def test_jobset_has_a_pod_per_host_of_the_topology(job: dict[str, Any]) -> None:
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = 1
    for size in topology.split("x"):
        chips *= int(size)
    per_host = container["resources"]["limits"]["google.com/tpu"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == chips // per_host == 4
    options = parse(container["args"])
    target = load_target(options["target"])
    assert target.topology is not None
    assert options["target"] == f"tpu7x:{topology}"
    assert options["tp"] == target.topology.devices
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu7x"


def test_jobset_command(job: dict[str, Any]) -> None:
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["mkc"]
    options = parse(container["args"])
    assert options["distributed"]
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert options["weights"].startswith("/weights/")
    assert str(options["packed"]).startswith("/weights/")
    volumes = {one["name"]: one for one in job["template"]["spec"]["volumes"]}
    assert volumes[mounts["/weights"]]["persistentVolumeClaim"]["readOnly"]
    assert set(mounts.values()) == set(volumes)


def test_jobset_names_a_model_that_there_is() -> None:
    """In its comment, which says how the packed weights are made."""
    (named,) = re.findall(r"mkc pack (\S+)", JOBSET.read_text())
    assert named in registered_models()


def test_jobset_probes(job: dict[str, Any]) -> None:
    """They ask process 0 alone: with nobody on the port they fail there, and nowhere else."""
    (container,) = job["template"]["spec"]["containers"]
    (port,) = container["ports"]
    patience = {}
    for name in ("startupProbe", "livenessProbe"):
        probe = container[name]
        command = probe["exec"]["command"]
        assert f"/{port['containerPort']}" in command[-1]
        patience[name] = probe["periodSeconds"] * probe["failureThreshold"]
        for index, fails in (("0", True), ("1", False), ("3", False)):
            environment = {**os.environ, "JOB_COMPLETION_INDEX": index}
            closed = [one.replace(str(port["containerPort"]), "1") for one in command]
            ended = subprocess.run(closed, env=environment, capture_output=True, check=False)
            assert (ended.returncode != 0) is fails
    options = parse(container["args"])
    assert patience["startupProbe"] >= options["start_timeout"]
    assert patience["livenessProbe"] <= 30


def slurm_run(tmp_path: Path, *, status: int, restarts: int = 0) -> tuple[int, list[str]]:
    """Runs the script with a Slurm that only writes down what it is told."""
    log = tmp_path / "calls"
    log.write_text("")
    for name, ends in (("srun", status), ("scontrol", 0)):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\nexit {ends}\n')
        tool.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "WEIGHTS": "folder",
        "SLURM_JOB_ID": "17",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    ended = subprocess.run(
        ["bash", str(SLURM)], env=environment, capture_output=True, check=False, text=True
    )
    return ended.returncode, log.read_text().splitlines()


def test_slurm_script_is_sound() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    if tool := shutil.which("shellcheck"):
        subprocess.run([tool, str(SLURM)], check=True)


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [(0, 0, False), (2, 0, False), (75, 0, True), (134, 2, True), (137, 0, True), (75, 3, False)],
)
def test_slurm_starts_again_unless_the_request_is_wrong(
    tmp_path: Path, status: int, restarts: int, requeued: bool
) -> None:
    code, calls = slurm_run(tmp_path, status=status, restarts=restarts)
    assert calls[0].startswith("srun ")
    assert calls[1:] == (["scontrol requeue 17"] if requeued else [])
    assert code == (0 if requeued else status)


def test_slurm_command() -> None:
    joined = SLURM.read_text().replace("\\\n", " ")
    (line,) = [one for one in joined.splitlines() if "mkc run" in one]
    words = shlex.split(line[line.index("mkc run") :])
    words = [one.replace("$BACKEND", "reference") for one in words]
    options = parse(words[1:])
    assert options["distributed"]
    assert options["coordinator"] is None


def test_parse_notices_wrong_options() -> None:
    with pytest.raises(Exception, match="--nodes"):
        parse(["run", "--prompt", "p", "--nodes", "4"])
