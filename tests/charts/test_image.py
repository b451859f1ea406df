"""The images' Dockerfile, as far as it can be judged without building it."""

import re
import subprocess
import sys
from pathlib import Path

from charts.rendering import CHART, SAMPLES, rendered

REPOSITORY = CHART.parents[1]
DOCKERFILE = (REPOSITORY / "docker" / "Dockerfile").read_text()


def test_hadolint_has_nothing_to_say():
    hadolint = Path(sys.executable).parent / "hadolint"
    result = subprocess.run([hadolint, REPOSITORY / "docker" / "Dockerfile"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_each_image_the_chart_asks_for_is_a_target():
    wanted = {
        container["image"].partition("0.1.0-")[2]
        for name in SAMPLES
        for component, pod in rendered(name).pods().items()
        if component != "etcd"
        for container in pod["containers"]
    }
    assert (
        wanted
        == {"cpu", "cuda", "sglang"}
        == wanted & set(re.findall(r"^FROM .* AS (\w+)$", DOCKERFILE, re.M))
    )


def test_images_run_as_the_user_that_the_chart_names():
    users = set(re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.M))
    security = rendered("least").pods()["decode"]["securityContext"]
    assert users == {(str(security["runAsUser"]), str(security["runAsGroup"]))}


def test_a_user_whom_no_file_names_has_a_name_and_a_home():
    """tests/cluster/operators/test_demo_command.py tries one."""
    runtimes = re.split(r"^FROM ", DOCKERFILE, flags=re.M)
    owned = [stage for stage in runtimes if "useradd" in stage]
    assert len(owned) == 2 and all("\nENV HOME=/tmp LOGNAME=isthmus\n" in stage for stage in owned)
    assert {"name": "HOME", "value": "/tmp"} in rendered("least").container("decode")["env"]


def test_base_images_are_pinned():
    images = re.findall(r"^ARG \w+_IMAGE=(\S+)$", DOCKERFILE, re.M)
    assert images
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def test_what_the_sglang_image_adds_is_pinned_as_everywhere():
    stage = DOCKERFILE.partition("AS sglang\n")[2]
    installed = [line.split()[-2] for line in stage.splitlines() if "pip install" in line]
    assert installed == ["--requirement=/wheels/requirements.txt", "/wheels/*.whl"]
    assert "COPY docker/requirements-sglang.txt /wheels/requirements.txt\n" in stage

    def pins(file):
        lines = (REPOSITORY / file).read_text().splitlines()
        return {line.partition(" ")[0] for line in lines if line and not line.startswith("#")}

    known = pins("constraints.txt") | pins("docker/requirements-cuda.txt")
    added = pins("docker/requirements-sglang.txt")
    assert added and added - known == set()
    assert all("==" in pin for pin in added)


def test_the_sglang_image_is_of_the_release_that_is_tested():
    pins = (REPOSITORY / "constraints-sglang.txt").read_text()
    assert "sglang==" + re.search(r"/sglang:v(\S+)", DOCKERFILE)[1] in pins
