"""The picture, as a terminal of 80 columns shows it."""

import io

import pytest
from rich.console import Console

from cli.top.cluster_news import D0, D1, finished, first, rank, running
from services.cli.look.cluster_picture import Picture
from services.cli.look.top_drawing import ASCII, draw
from services.wire.isthmus.v1 import common_pb2

pytestmark = pytest.mark.long


@pytest.fixture
def picture():
    picture = Picture(60.0, 0.0)
    requests = [
        finished(1, prompt=200, found=0),
        finished(2, prompt=1_000, found=900, ttft_s=0.0123),
        finished(3, prompt=50, found=40, decode=D1, plan=common_pb2.PLAN_LOCAL),
        finished(4, outcome="RESOURCE_EXHAUSTED"),
    ]
    picture.add(first(finished=requests), 4.0, is_first=True)
    return picture


def shown(picture, width=80, height=None, **options):
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(draw(picture, 5.0, width, height, title="here  all tenants", glyphs=ASCII, **options))
    return [line.rstrip() for line in console.export_text().splitlines()]


EXPECTED = """\
isthmus top  here  all tenants  1 prefill, 2 decode ranks
last 60 s  0.8 requests/s  75% found  TTFT p50 20 ms, p99 20 ms  1 failed  1 run

rank       role     state  pool             used  run  wait  found  tok/s  trust
decode/0   decode   live   ###====........   20%    2     0    75%    300   1.00
decode/1   decode   live   ###====........   20%    2     3    80%    300   1.00
prefill/0  prefill  live   #==............    5%    0     0    38%   9000   1.00

running    conversation  decode    prefill      age  prompt  out
request-1  holiday       decode/0  prefill/0  3.0 s     100    7

finished  decode    found/moved    prompt  found   KV moved   TTFT  out  end
done-4                                                                   no room
done-3    decode/1  ##########...      50    80%             20 ms   16  stop
done-2    decode/0  ############=    1000    90%  200.0 KiB  12 ms   16  stop
done-1    decode/0  =============     200     0%  400.0 KiB  20 ms   16  stop

pool # used = cached . free  prompt # found = moved . computed  q leaves
"""


def test_pictures(subtests, picture):
    with subtests.test("it fits 80 columns"):
        lines = shown(picture, hint="q leaves")
        assert max(map(len, lines)) <= 80
        assert lines == EXPECTED.splitlines()
    with subtests.test("what was pulled has a column where there is room, and stands with what came"):
        pulled = Picture(60.0, 0.0)
        local = finished(5, prompt=100, found=80, pulled=60, plan=common_pb2.PLAN_LOCAL)
        pulled.add(first(finished=[finished(4, prompt=100, found=80, pulled=30), local]), 4.0, is_first=True)
        lines = shown(pulled, width=120)
        (headings,) = (line.split() for line in lines if line.startswith("finished"))
        (here,) = (line.split() for line in lines if line.startswith("done-5"))
        (there,) = (line.split() for line in lines if line.startswith("done-4"))
        assert "pulled" in headings and "60" in here and "30" in there
        assert "20%" in here and "80%" in there and "120.0" in here
    with subtests.test("where there is room none is left out"):
        lines = shown(picture, height=24)
        assert not any("more" in line for line in lines)
        assert [line for line in lines if line] == [line for line in shown(picture) if line]
    with subtests.test("of several tenants it is told whose"):
        picture.add(first(running=[running(tenant="acme")]), 5.0, is_first=False)
        assert any(line.split()[:2] == ["request-1", "acme"] for line in shown(picture))
    with subtests.test("what a client named is shown as it is"):
        picture.add(first(running=[running(tenant="[red]x[/red]")]), 5.0, is_first=False)
        assert any("[red]x[/red]" in line for line in shown(picture, width=120))
    for height in [8, 12, 16, 24]:
        with subtests.test("of all something is seen however few lines there are", height=height):
            many = [rank(common_pb2.RankId(worker="decode", rank=number)) for number in range(40)]
            ran = [running(number) for number in range(30)]
            picture.add(first(ranks=many, running=ran, num_running=30), 5.0, is_first=False)
            lines = shown(picture, height=height, hint="q leaves")
            assert len(lines) <= height
            if height >= 16:
                assert any(line.startswith("decode/0") for line in lines)
                assert any("more ranks" in line for line in lines)
                assert any(line.startswith("request-0") for line in lines)
                assert any("more requests that run" in line for line in lines)
                assert any(line.startswith("done-4") for line in lines)
                assert lines[-1].endswith("q leaves")
    with subtests.test("a cluster without ranks says so"):
        assert "no rank is registered" in shown(Picture(60.0, 0.0))
    with subtests.test("states have colours"):
        other = Picture(60.0, 0.0)
        ranks = [rank(D0), rank(D1, state="suspect")]
        other.add(first(ranks=ranks), 0.0, is_first=True)
        console = Console(
            record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="standard"
        )
        console.print(draw(other, 0.0, 80))
        text = console.export_text(styles=True)
        assert "\x1b[32mlive" in text and "\x1b[33msuspect" in text
    with subtests.test("what is wrong is said"):
        picture.add(
            first(dropped=5, degraded="etcd is away", staleness_s=2.0, running=[running(decode=None)]),
            5.0,
            is_first=False,
        )
        picture.away = "no router answers; trying again"
        lines = shown(picture)
        for sentence in (
            "no router answers; trying again",
            "degraded: etcd is away",
            "the index is 2.0 s behind the ranks",
            "5 finished requests were not reported: this reads too slowly",
        ):
            assert sentence in lines
