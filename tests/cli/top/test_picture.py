import pytest

from cli.top.cluster_news import D0, D1, finished, first, rank, running
from services.cli.look.cluster_picture import Picture
from services.wire.isthmus.v1.generation_pb2 import WatchClusterResponse

pytestmark = pytest.mark.long


def names(picture):
    return [f"{each.rank.worker}/{each.rank.rank}:{each.state}" for each in picture.ranks]


def test_a_picture_follows_its_news(subtests):
    with subtests.test("ranks come change and go"):
        picture = Picture(60.0, 0.0)
        picture.add(first(), 1.0, is_first=True)
        assert names(picture) == ["decode/0:live", "decode/1:live", "prefill/0:live"]
        news = WatchClusterResponse(ranks=[rank(D1, state="suspect")], gone=[D0])
        picture.add(news, 2.0, is_first=False)
        assert names(picture) == ["decode/1:suspect", "prefill/0:live"]
    with subtests.test("a new stream has all ranks"):
        picture = Picture(60.0, 0.0)
        picture.add(first(), 1.0, is_first=True)
        picture.away = "no router answers"
        picture.add(WatchClusterResponse(ranks=[rank(D1)]), 9.0, is_first=True)
        assert names(picture) == ["decode/1:live"] and not picture.away
    with subtests.test("requests grow older between two responses"):
        picture = Picture(60.0, 0.0)
        picture.add(first(finished=[finished(1), finished(2)]), 1.0, is_first=True)
        picture.add(WatchClusterResponse(running=[running()], finished=[finished(3)]), 2.0, is_first=False)
        assert [age_s for age_s, _ in picture.running(5.0)] == [5.0]
        told = [(ago_s, each.request_id) for ago_s, each in picture.finished(5.0)]
        assert told == [(3.0, "done-3"), (4.0, "done-2"), (4.0, "done-1")]
