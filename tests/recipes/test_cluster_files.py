"""The examples of docs/clusters.md: their schemas, their command lines, and what the batch script
does with Slurm's and Ray's commands played by small scripts (tests/recipes/slurm_bin)."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rltrain.config import Config
from rltrain.main import compose

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "recipes/cluster"
SCRIPT = CLUSTER / "slurm.sbatch"
BIN = Path(__file__).with_name("slurm_bin")
OVERRIDES = ["+recipe=grpo_moe_r3", "trainer.output_dir=/shared/a b"]


# Slurm


def submit(folder: Path, nodes: str, **env: str) -> subprocess.Popen[str]:
    """Start the script as Slurm would on the first node."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_CPUS_ON_NODE": "8"}
    path = {"PATH": f"{BIN}:{os.environ['PATH']}", "STATE": str(folder)}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *OVERRIDES],
        cwd=folder,
        env={**os.environ, **job, **path, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def calls(folder: Path) -> list[str]:
    file = folder / "calls"
    return file.read_text().splitlines() if file.is_file() else []


def test_a_raylet_on_each_node_then_the_run_on_the_first(tmp_path: Path) -> None:
    job = submit(tmp_path, "n[1,2,3]")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 0, output
    made = calls(tmp_path)
    block = "ray start --block --temp-dir=/tmp/ray-7"
    assert made[0].startswith(f"n1 {block} --head --node-ip-address=10.0.0.1 --port=20007")
    assert made[0].endswith(" token=64 mode=token")
    workers = sorted(made[1:3])
    for number, line in zip((2, 3), workers, strict=True):
        at = f"--address=10.0.0.1:20007 --node-ip-address=10.0.0.{number}"
        assert line.startswith(f"n{number} {block} {at}")
    run = "n1 python -m rltrain.main cluster.address=10.0.0.1:20007 " + " ".join(OVERRIDES)
    assert made[3] == run
    assert sorted(made[4:]) == [f"n{n} ray stopped" for n in (1, 2, 3)]


def test_the_runs_status_is_the_jobs(tmp_path: Path) -> None:
    job = submit(tmp_path, "n[1]", RUN_STATUS="5")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 5, output
    assert calls(tmp_path)[-1] == "n1 ray stopped"


def test_slurms_warning_reaches_the_run_which_ends_in_order(tmp_path: Path) -> None:
    job = submit(tmp_path, "n[1,2]", RUN_S="60")
    until = time.monotonic() + 60
    while not any("rltrain.main" in line for line in calls(tmp_path)):
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.1)
    time.sleep(0.3)
    os.kill(job.pid, signal.SIGTERM)  # as --signal=B:TERM does: the script alone
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 143, output
    made = calls(tmp_path)
    assert made[-3] == "n1 rltrain interrupted"
    assert sorted(made[-2:]) == ["n1 ray stopped", "n2 ray stopped"]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("n[1,9]", "all 2 nodes not there after 2 s: see ray-7-*.log"),
        ("n[1,8]", "a raylet ended while waiting for all 2 nodes: see ray-7-*.log"),
        ("n[9,1]", "Ray's head not there after 2 s: see ray-7-*.log"),
    ],
)
def test_a_node_that_does_not_come_ends_the_job(tmp_path: Path, nodes: str, said: str) -> None:
    job = submit(tmp_path, nodes, START_LIMIT_S="2")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1 and said in output, output
    made = calls(tmp_path)
    assert not any("rltrain.main" in line for line in made)
    assert made[-1].endswith("ray stopped")


# KubeRay and SkyPilot


def schema(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text())


def manifest(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text())


@pytest.mark.parametrize(
    ("file", "against"),
    [("kuberay.yaml", "kuberay_rayjob.json"), ("skypilot.yaml", "skypilot_task.json")],
)
def test_an_example_has_the_published_shape(file: str, against: str) -> None:
    validator = jsonschema.Draft202012Validator(schema(against))
    validator.check_schema(validator.schema)
    assert [error.message for error in validator.iter_errors(manifest(file))] == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('num-cpus: "0"', "num-cpus: 0", "0 is not of type 'string'"),
        ("groupName: gpu", "group: gpu", "'group' was unexpected"),
        ("sizeLimit: 8Gi", "sizeLimit: 8 GB", "'8 GB' is not valid"),
        ("headGroupSpec:", "headSpec:", "'headSpec' was unexpected"),
    ],
)
def test_a_fault_in_the_manifest_is_found(old: str, new: str, said: str) -> None:
    text = (CLUSTER / "kuberay.yaml").read_text()
    assert old in text
    validator = jsonschema.Draft202012Validator(schema("kuberay_rayjob.json"))
    errors = validator.iter_errors(yaml.safe_load(text.replace(old, new, 1)))
    assert any(said in error.message for error in errors)


def test_the_rayjob_has_a_head_without_ranks_and_workers_with_the_recipes_gpus() -> None:
    cluster = manifest("kuberay.yaml")["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert (head["rayStartParams"]["num-cpus"], head["rayStartParams"]["num-gpus"]) == ("0", "0")
    pods = [group["template"]["spec"] for group in (head, workers)]
    for pod in pods:
        (container,) = pod["containers"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
        wanted, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert wanted["memory"] == limits["memory"]
    assert pods[0]["containers"][0]["image"] == pods[1]["containers"][0]["image"]
    assert cluster["authOptions"] == {"mode": "token"}
    gpus = int(pods[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus * workers["replicas"] == ranks(rayjob_command())
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert cluster["rayVersion"] in (ROOT / "requirements-gpu.lock").read_text()


def rayjob_command() -> list[str]:
    return shlex.split(manifest("kuberay.yaml")["spec"]["entrypoint"])


def skypilot_command() -> list[str]:
    """The last command of ``run``, with the variables that are known here."""
    task = manifest("skypilot.yaml")
    text = task["run"].replace("\\\n", " ").strip().splitlines()[-1]
    for name, value in {**task["envs"], "HOME": "/home/me", "address": "10.0.0.1:6399"}.items():
        text = re.sub(rf"\${name}\b", value, text)
    return shlex.split(text)


def composed(command: list[str]) -> Config:
    assert command[:3] == ["python", "-m", "rltrain.main"]
    return compose(command[3:])


def ranks(command: list[str]) -> int:
    config = composed(command)
    return config.policy.parallel.world_size + config.engine_ranks


def test_the_commands_of_the_examples_compose() -> None:
    assert composed(rayjob_command()).cluster.address == "auto"
    assert composed(skypilot_command()).cluster.address == "10.0.0.1:6399"
    task = manifest("skypilot.yaml")
    _, per_node = task["resources"]["accelerators"].split(":")
    assert int(per_node) * task["num_nodes"] == ranks(skypilot_command())


def test_skypilots_script_is_valid_bash() -> None:
    text = manifest("skypilot.yaml")["run"]
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
