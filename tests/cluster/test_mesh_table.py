"""The README's table of meshes is what the planner says."""

import subprocess
import sys

import pytest

from tests.cluster.launch_files import ROOT


@pytest.mark.slow
def test_the_readme_has_the_planners_table_of_meshes() -> None:
    # In a process of its own: it needs more virtual devices than the suite has.
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.mesh_table"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (kept,) = readme.partition("<!-- meshes: ")[2].partition("<!-- meshes end -->")[:1]
    assert done.stdout.count("\n") > 5
    assert kept.partition("-->")[2].strip() == done.stdout.strip()
