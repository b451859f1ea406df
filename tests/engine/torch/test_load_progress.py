"""The log while weights are loaded."""

import logging

from transformers.utils.logging import set_tqdm_hook, tqdm

from services.engine.torch.load_progress import telling


def test_it_is_told_every_two_seconds(caplog):
    caplog.set_level(logging.INFO)
    now = [0.0]
    with telling(lambda: now[0]):
        seen = []
        for name in tqdm({"a": 1, "b": 2, "c": 3, "d": 4}.items(), desc="Loading weights"):
            seen.append(name)
            now[0] += 1.0
        bar = tqdm(total=3)  # one that is not gone through
        bar.update(1)
        bar.close()
    assert [name for name, _ in seen] == ["a", "b", "c", "d"]
    assert [record.getMessage() for record in caplog.records] == ["weights_loading done=2 of=4"]
    assert set_tqdm_hook(None) is None
