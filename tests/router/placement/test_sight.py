"""A decision looks each rank up once."""

from collections import Counter

from router.placement.known_cluster import Router


def test_a_decision_looks_anew_and_once(monkeypatch, subtests):
    with subtests.test("a decision asks once what a rank does now and whether it is well"):
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
    with subtests.test("another decision looks again"):
        router = Router(2, 0)
        router.waits(router.decodes[0], 5_000)
        assert router.place().chosen.decode.id == router.decodes[1].id
        router.waits(router.decodes[1], 50_000)
        assert router.place().chosen.decode.id == router.decodes[0].id
