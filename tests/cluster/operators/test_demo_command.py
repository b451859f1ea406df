"""What `isthmus demo` prints of a conversation."""

import re

from cluster.harness import FakeCluster
from services.cli.local import demo
from services.net import channels


async def test_the_demo_shows_each_turn_and_what_moved(etcd_endpoint, model_dir, cluster_name, capsys):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
        async with channels.open_channel(f"127.0.0.1:{cluster.routers[0].server.port}") as channel:
            await demo._converse(channel, demo.DemoConfig(turns=3, max_tokens=8))
        await cluster.assert_nothing_held()
    printed = capsys.readouterr().out
    questions = re.findall(r"^user       (.+)\nassistant  .", printed, re.M)
    assert questions == list(demo._QUESTIONS[:3])
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
