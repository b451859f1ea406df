"""Under plan remote the router has prefill pull what decode holds of a next turn: the last answer, too."""

import pytest

from cluster.harness import FakeCluster, prompt_of
from services.engine.fake import continuation
from services.engine.paged.shell import pulling
from services.engine.paged.shell.pulling import PullBounds


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(pulling, "BOUNDS", PullBounds(least_s=20.0, unknown_s=20.0, grant_s=20.0))


async def test_prefill_pulls_what_decode_generated(etcd_endpoint, model_dir, cluster_name, subtests):
    for pull in ("on", "off"):
        with subtests.test(pull=pull):
            name, slow = f"{cluster_name}-{pull}", {"fake_prompt_token_s": 0.002, "kv_pages": 512}
            async with FakeCluster(etcd_endpoint, model_dir, name, decode=(1,), pull=pull, **slow) as cluster:
                history = prompt_of(1, 60)
                for turn in range(2):
                    tokens, finish = await cluster.generate(history, 300)
                    assert tokens == continuation(history, 300)
                    usage = finish.usage
                    if turn and pull == "on":
                        assert usage.pulled_tokens >= 290
                        assert usage.computed_tokens <= 24
                    elif turn:
                        assert usage.pulled_tokens == 0 and usage.computed_tokens >= 300
                    await cluster.until_indexed(finish.placement.decode, [*history, *tokens[:-4]])
                    history = [*history, *tokens, *prompt_of(2 + turn, 12)]
                await cluster.assert_nothing_held()
