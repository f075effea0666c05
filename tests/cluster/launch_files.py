"""The files of cluster/launch, and what a RayService may hold, for tests."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "cluster" / "launch"
CLUSTERS = sorted(path for path in LAUNCH.glob("*.yaml") if not path.name.startswith("rayservice"))
SERVICES = sorted(LAUNCH.glob("rayservice*.yaml"))

Fields = dict[str, Any]
"""{field: its type, or the fields it has}; `dict` is not looked into, and a list of one holds any number of such."""

_POD = {"metadata": dict, "spec": dict}
_GROUP = {"rayStartParams": dict, "resources": dict, "labels": dict, "template": _POD}

RAY_SERVICE: Fields = {
    "apiVersion": str,
    "kind": str,
    "metadata": dict,
    "spec": {
        "deploymentUnhealthySecondThreshold": int,
        "excludeHeadPodFromServeSvc": bool,
        "managedBy": str,
        "rayClusterDeletionDelaySeconds": int,
        "serveConfigV2": str,
        "serveService": dict,
        "serviceUnhealthySecondThreshold": int,
        "suspend": bool,
        "upgradeStrategy": dict,
        "rayClusterConfig": {
            "authOptions": {"mode": str, "secretName": str, "enableK8sTokenAuth": bool},
            "autoscalerOptions": {
                "idleTimeoutSeconds": int,
                "image": str,
                "resources": dict,
                "upscalingMode": str,
                "version": str,
            },
            "enableInTreeAutoscaling": bool,
            "gcsFaultToleranceOptions": dict,
            "headGroupSpec": {**_GROUP, "enableIngress": bool, "headService": dict, "serviceType": str},
            "rayVersion": str,
            "workerGroupSpecs": [
                {
                    **_GROUP,
                    "groupName": str,
                    "idleTimeoutSeconds": int,
                    "maxReplicas": int,
                    "minReplicas": int,
                    "numOfHosts": int,
                    "replicas": int,
                    "scaleStrategy": dict,
                    "suspend": bool,
                }
            ],
        },
    },
}
"""Of ray.io/v1 as KubeRay 1.7 knows it: what these files use, and what stands beside it. Pods are Kubernetes' own."""


def load(path: Path) -> dict[str, Any]:
    """A YAML file that holds one mapping."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def misfits(value: Any, fields: Any, where: str = "") -> list[str]:
    """Paths in `value` that `fields` does not know, or of another type."""
    if isinstance(fields, list):
        if not isinstance(value, list):
            return [where]
        return [path for i, item in enumerate(value) for path in misfits(item, fields[0], f"{where}[{i}]")]
    if isinstance(fields, dict):
        if not isinstance(value, dict):
            return [where]
        unknown = [f"{where}.{name}" for name in value if name not in fields]
        known = [name for name in value if name in fields]
        return unknown + [path for name in known for path in misfits(value[name], fields[name], f"{where}.{name}")]
    return [] if type(value) is fields else [where]
