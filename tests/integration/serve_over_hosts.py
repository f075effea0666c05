"""`python -m tests.integration.serve_over_hosts PORT TEMP_DIR`: configs/grok1-tiny.yaml, each replica over two hosts.

A Ray cluster of two nodes on this machine, which its own handle ends. Serves until SIGTERM.
"""

import sys
from pathlib import Path

import yaml

from serve_app.config import ServeFile
from serve_app.environment import prepare_environment


def over_two_hosts(port: int) -> ServeFile:
    """The file, with half the devices on each of two machines."""
    content = yaml.safe_load(Path("configs/grok1-tiny.yaml").read_text(encoding="utf-8"))
    content["http_options"] = {"port": port}
    args = content["applications"][0]["args"]
    args["engine"] |= {"num_slots": 2, "max_model_len": 64}
    args["mesh"] |= {
        "model": 4,
        "hosts_along_model": 2,
        "hosts": 2,
        "host_placement": "apart",
        "host_silence_timeout_s": 20.0,
    }
    args["serving"] = {"ingress_num_cpus": 0.1, "graceful_shutdown_s": 10.0, "health_check_period_s": 1.0}
    return ServeFile.model_validate(content)


def main() -> int:
    """The process."""
    prepare_environment()
    from ray.cluster_utils import Cluster

    from serve_app.server import Server, serve_until_stopped

    file = over_two_hosts(int(sys.argv[1]))
    common = {"temp_dir": sys.argv[2], "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2, **common)
        return serve_until_stopped(Server(file, address=cluster.address))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
