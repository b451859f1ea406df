"""A decision looks each rank up once."""

from collections import Counter

from router.placement.known_cluster import Router


def test_a_decision_asks_once_what_a_rank_does_now_and_whether_it_is_well(monkeypatch):
    router, asked = Router(40, 30), Counter()
    for name in ("now", "liveness"):
        known = getattr(router.balance, name)

        def counted(rank, name=name, known=known):
            asked[name, rank] += 1
            return known(rank)

        monkeypatch.setattr(router.balance, name, counted)
    decision = router.place(max_wait_s=5.0)
    assert asked["now", decision.chosen.decode.id.key] == 1
    assert set(asked.values()) == {1}


def test_another_decision_looks_again():
    router = Router(2, 0)
    router.waits(router.decodes[0], 5_000)
    assert router.place().chosen.decode.id == router.decodes[1].id
    router.waits(router.decodes[1], 50_000)
    assert router.place().chosen.decode.id == router.decodes[0].id
