"""The cluster files, checked by what will read them: Ray's launcher, `ray start`, bash, Serve, and this project."""

import copy
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from serve_app.config import ServeFile, load_file
from tests.cluster.launch_files import CLUSTERS, LAUNCH, RAY_SERVICE, ROOT, SERVICES, load, misfits

# Ray's own modules warn while they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
WORDS_OF_THE_CLOUDS = {
    "CPU",
    "GPU",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT",
    "RAY_USAGE_STATS_ENABLED",
    "HF_HOME",
    "HOME",
    "PATH",
    "TERMINATE",
    "PERSISTENT",
}
NUMBERS = ("no", "one", "two", "three", "four", "five")
by_name = pytest.mark.parametrize("path", [*CLUSTERS, *SERVICES], ids=lambda path: path.stem)
clusters = pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
services = pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.stem)


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """What the launcher makes of a file, by the calls that `ray up` begins with."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    result = prepare_config(copy.deepcopy(config))
    validate_config(result)
    return result


def ray_start_options(command: str) -> dict[str, Any]:
    """The options of a `ray start` in a shell command, as Ray itself reads them."""
    from ray.scripts.scripts import start

    words = shlex.split(command.rpartition("ray start")[2])
    return start.make_context("ray start", words).params


def served_by(path: Path) -> ServeFile:
    """The application that a file's first lines deploy."""
    (name,) = set(re.findall(r"configs/\S+\.yaml", path.read_text(encoding="utf-8")))
    return load_file(ROOT / name)


def test_there_is_a_file_for_each_kind_of_cluster_and_replica() -> None:
    names = {path.stem for path in [*CLUSTERS, *SERVICES]}
    kinds = ("onprem", "aws", "gcp", "rayservice")
    assert names == {f"{kind}{suffix}" for kind in kinds for suffix in ("", "-multihost")}


@clusters
def test_the_launcher_accepts_the_file(path: Path) -> None:
    config = load(path)
    result = prepared(config)
    kind = path.stem.partition("-")[0]
    assert result["provider"]["type"] == {"onprem": "local"}.get(kind, kind)
    workers = [t for name, t in result["available_node_types"].items() if name != result["head_node_type"]]
    if kind == "onprem":
        assert result["max_workers"] == len(config["provider"]["worker_ips"])
    else:
        (worker,) = workers
        assert 0 < worker["min_workers"] <= worker["max_workers"] <= result["max_workers"]


@clusters
def test_the_launcher_refuses_a_field_that_it_does_not_know(path: Path) -> None:
    with pytest.raises(jsonschema.ValidationError, match="worker_start_commands"):
        prepared({**load(path), "worker_start_commands": []})


@clusters
def test_every_command_is_bash(path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    config = prepared(load(path))
    commands = [command for name in COMMANDS for command in config[name]]
    assert len(commands) > 4
    for command in commands:
        done = subprocess.run([bash, "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}"


@clusters
def test_ray_is_stopped_and_then_started_with_options_that_it_knows(path: Path) -> None:
    config = load(path)
    for role in ("head", "worker"):
        stop, start = config[f"{role}_start_ray_commands"]
        assert stop == "ray stop"
        options = ray_start_options(start)
        assert options["head"] is (role == "head")
    head = ray_start_options(config["head_start_ray_commands"][1])
    worker = ray_start_options(config["worker_start_ray_commands"][1])
    # The launcher's own file is what lets the head start the others.
    assert head["autoscaling_config"].endswith("ray_bootstrap_config.yaml")
    assert worker["address"] == f"$RAY_HEAD_IP:{head['port']}"


@clusters
def test_machines_and_commands_need_the_token(path: Path) -> None:
    config = load(path)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "RAY_AUTH_MODE=token" in config["setup_commands"][0]


@pytest.mark.parametrize("path", [p for p in CLUSTERS if "onprem" in p.stem], ids=lambda path: path.stem)
def test_setting_up_twice_writes_the_environment_once(path: Path, tmp_path: Path) -> None:
    for _ in range(2):
        command = load(path)["setup_commands"][0]
        subprocess.run(["bash", "-c", command], check=True, env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    lines = (tmp_path / ".bashrc").read_text().splitlines()
    assert len(lines) == 1
    shown = subprocess.run(
        ["bash", "-c", ". ~/.bashrc; echo $RAY_AUTH_MODE $PATH"],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith(f"token {tmp_path}/jax-serve/.venv/bin:")


@by_name
def test_what_must_be_filled_in_is_marked_and_counted(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    marked = [line for line in text.splitlines() if "# FILL IN" in line]
    content = [line.partition(" # ")[0] for line in text.splitlines() if not line.lstrip().startswith("#")]
    words = {word for line in content for word in re.findall(r"(?<![\w$.-])[A-Z]{3,}(?:_[A-Z]+)*(?![\w=.-])", line)}
    placeholders = words - WORDS_OF_THE_CLOUDS
    used = [line for line in content if set(re.findall(r"\w+", line)) & placeholders]
    assert sorted(used) == sorted(line.partition(" # ")[0] for line in marked)
    (number,) = re.findall(r"with the (\w+) lines marked FILL IN", text)
    assert number == NUMBERS[len(marked)]


@by_name
def test_comments_name_files_and_commands_that_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    names = re.findall(r"(?<![\w/.~])(?:cluster|configs)/[\w/.-]+", text)
    assert f"cluster/launch/{path.name}" in names
    assert [name for name in names if not (ROOT / name).exists()] == []
    if path in CLUSTERS:
        from ray.scripts.scripts import cli

        used = set(re.findall(r"\.venv/bin/ray ([a-z-]+)", text))
        assert {"get-auth-token", "up", "exec", "rsync-up", "down"} <= used <= set(cli.commands)


@by_name
def test_lines_can_be_read_on_a_screen(path: Path) -> None:
    assert [line for line in path.read_text(encoding="utf-8").splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("path", [p for p in CLUSTERS if "onprem" not in p.stem], ids=lambda path: path.stem)
def test_the_machines_hold_what_the_application_asks_for(path: Path) -> None:
    config, application = load(path), served_by(path).application.args
    gpu = config["available_node_types"]["gpu"]
    assert application.serving.replica_num_gpus == gpu["resources"]["GPU"]
    assert application.mesh.data * application.mesh.model == gpu["resources"]["GPU"]
    assert application.mesh.num_hosts == (2 if "multihost" in path.stem else 1)
    assert gpu["min_workers"] % application.mesh.num_hosts == 0
    assert "GPU" not in config["available_node_types"]["head"]["resources"]
    assert application.serving.max_replicas * application.mesh.num_hosts <= gpu["max_workers"]


def test_on_premises_files_deploy_an_application_of_that_kind() -> None:
    assert served_by(LAUNCH / "onprem.yaml").application.args.mesh.num_hosts == 1
    assert served_by(LAUNCH / "onprem-multihost.yaml").application.args.mesh.num_hosts == 2


@services
def test_a_service_has_only_fields_that_kuberay_knows(path: Path) -> None:
    service = load(path)
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert misfits(service, RAY_SERVICE) == []
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["autoscalerOptions"]["version"] in ("v1", "v2")
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@services
def test_a_mistake_in_a_service_is_noticed(path: Path) -> None:
    service = load(path)
    cluster = service["spec"]["rayClusterConfig"]
    cluster["workerGroupSpecs"][0]["numHosts"] = 2
    cluster["rayVersion"] = 2.6
    assert misfits(service, RAY_SERVICE) == [
        ".spec.rayClusterConfig.rayVersion",
        ".spec.rayClusterConfig.workerGroupSpecs[0].numHosts",
    ]


@services
def test_a_service_starts_ray_with_options_that_it_knows(path: Path) -> None:
    import ray

    cluster = load(path)["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        ray_start_options("ray start " + " ".join(f"--{k}={v}" for k, v in group["rayStartParams"].items()))
    assert cluster["rayVersion"] == ray.__version__


@services
def test_pods_are_whole(path: Path) -> None:
    cluster = load(path)["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "IMAGE"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@services
def test_a_service_serves_the_application_that_its_comment_names(path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    content = yaml.safe_load(load(path)["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(content).applications
    assert application.import_path == "serve_app.app:build"
    served, named = ServeFile.model_validate(content), served_by(path)
    of_volume = {"compilation_cache_dir": "/models/programs"}
    assert served.application.args == named.application.args.model_copy(update=of_volume)


@services
def test_pods_hold_what_the_application_asks_for(path: Path) -> None:
    service = load(path)
    application = ServeFile.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"])).application.args
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    gpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert application.serving.replica_num_gpus == application.mesh.data * application.mesh.model == gpus
    assert application.mesh.num_hosts == group.get("numOfHosts", 1)
    assert application.serving.max_replicas <= group["maxReplicas"]
    # What is asked to go may finish its answers for as long as the application allows.
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= application.serving.graceful_shutdown_s
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= application.serving.graceful_shutdown_s
