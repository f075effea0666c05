"""`python -m tests.fakes.serve_main PORT TEMP_DIR`: the real server with the fake engine."""

import sys

from serve_app.config import ServeFile
from serve_app.environment import prepare_environment


def main() -> int:
    """Serves until SIGTERM."""
    prepare_environment()
    from serve_app.server import Server, serve_until_stopped
    from tests.fakes.serving import fake_engine, fake_text

    file = ServeFile.model_validate(
        {
            "http_options": {"port": int(sys.argv[1])},
            "applications": [
                {
                    "import_path": "serve_app.app:build",
                    "args": {
                        "model": {"source": "nowhere/fake"},
                        "engine": {"num_slots": 4, "max_queue_len": 4, "max_model_len": 4096},
                        "serving": {
                            "replica_num_cpus": 0.1,
                            "graceful_shutdown_s": 30.0,
                            "health_check_period_s": 1.0,
                        },
                    },
                }
            ],
        }
    )
    return serve_until_stopped(Server(file, engine_factory=fake_engine, text_factory=fake_text, temp_dir=sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
