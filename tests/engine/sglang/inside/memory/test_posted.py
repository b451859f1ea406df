from services.engine.sglang.inside.memory.posted import Posted


def test_pages_tails_and_states_are_counted_apart():
    posted = Posted()
    posted.pages(3, 100)
    posted.pages(2, 100)
    posted.carried("swa", 40)
    posted.carried("mamba", 7)
    posted.carried("swa", 40)  # to another process of the peer's
    assert (posted.num_pages, posted.size_bytes) == (5, 500)
    assert posted.carried_bytes == {"swa": 80, "mamba": 7}
