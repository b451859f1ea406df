"""These tests show how long a prompt and its answer may become, by what the ranks say."""

from router.cluster.fake_mirror import D0, D1, cluster_of, started, view
from services.values.rank import Plan, Role
from services.values.rank_reports import REMOTE_ONLY
from services.values.request import FinishReason

BOUNDS = [
    ({Plan.REMOTE}, (), 101),
    ({Plan.REMOTE, Plan.LOCAL}, (), 500),
    ({Plan.LOCAL}, (), 500),
    ({Plan.REMOTE, Plan.LOCAL}, (REMOTE_ONLY,), 101),
]


async def test_a_prompt_that_only_prefill_computes_must_fit_there(mirror, balance, subtests):
    for plans, capabilities, bound in BOUNDS:
        with subtests.test(plans=plans, capabilities=capabilities, bound=bound):
            mirror.set(
                view(Role.DECODE, 0, max_context_tokens=500, capabilities=capabilities),
                view(Role.DECODE, 1, max_context_tokens=64, capabilities=capabilities),
            )
            async with started(cluster_of(mirror, balance, plans)) as cluster:
                assert cluster.max_context_tokens() == 500  # who prefills is not known yet
                mirror.set(*(view(Role.PREFILL, i, max_context_tokens=80 + 20 * i) for i in (0, 1)))
                assert cluster.max_context_tokens() == bound
                mirror.set(view(Role.PREFILL, 1, max_context_tokens=9_000))
                assert cluster.max_context_tokens() == 500


async def test_a_rank_that_drains_neither_forbids_a_plan_nor_lengthens_the_context(cluster, mirror):
    mirror.set(
        view(Role.DECODE, 0, max_context_tokens=500, capabilities=(REMOTE_ONLY,), draining=True),
        view(Role.DECODE, 1, max_context_tokens=64),
    )
    assert cluster.max_context_tokens() == 64
    assert cluster._plans() == frozenset(Plan)
    mirror.set(view(Role.DECODE, 1, max_context_tokens=64, draining=True))  # nobody stays
    assert cluster.max_context_tokens() == 500
    assert cluster._plans() == {Plan.REMOTE}


async def test_the_models_context_is_that_of_the_rank_that_knows_most_of_it(cluster, mirror):
    """Ranks from before they said so had no less than they hold; one that drains knows it too."""
    mirror.set(view(Role.DECODE, 0, max_context_tokens=500), view(Role.DECODE, 1, max_context_tokens=64))
    assert cluster.length_means(500, 9, None) is FinishReason.LENGTH
    assert cluster.length_means(64, 9, None) is None
    assert cluster.length_means(64, 9, 9) is FinishReason.LENGTH
    said = {"max_context_tokens": 900, "model_context_tokens": 1_000}
    mirror.set(view(Role.DECODE, 0, **said, draining=True))
    assert cluster.length_means(64, 9, None) is FinishReason.CAPACITY
    mirror.remove(D0)
    mirror.remove(D1)
    assert cluster.length_means(1_000, 9, None) is FinishReason.LENGTH  # what is known stays known
    prompt = await cluster.hash(tuple(range(100)), "", 5_000)
    mirror.set(view(Role.DECODE, 0, **said))
    assert cluster._asked(prompt, "", frozenset()).most_tokens == 1_000
    assert cluster._asked(await cluster.hash((1, 2), ""), "", frozenset()).most_tokens is None
