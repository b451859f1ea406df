"""Texts that are guessed as often as their case says."""

import json
import random
import sys
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.speculative import __main__ as speculative
from bench.speculative.models import DRAFT, Shape, circles, successors, write
from bench.speculative.workload import CASES, RIGHT, TEXT_SEED, conversations, text


@pytest.mark.parametrize("share", [RIGHT, 0.5, 0.0])
def test_a_model_follows_its_circles_as_often_as_is_said(tmp_path, share):
    write(tmp_path, DRAFT, share=share, seed=TEXT_SEED)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = list(text(share, 200, random.Random(1)))
    with torch.inference_mode():
        chances = model(torch.tensor([ids])).logits[0].softmax(-1)
    follows = successors(TEXT_SEED)
    mean = sum(float(chances[at, follows[i]]) for at, i in enumerate(ids)) / len(ids)
    assert mean == pytest.approx(share, abs=0.06)


def test_a_prompt_that_recites_shows_every_circle_twice():
    case = next(case for case in CASES if case.recites)
    (talk,) = conversations(case, 1, 2, seed=3)
    prompt, follows = talk.questions[0], successors(TEXT_SEED)
    shown = {a: [] for a in follows}
    for a, b in pairwise(prompt):
        shown[a].append(b)
    assert all(following.count(follows[a]) >= 1 for a, following in shown.items())
    assert len(prompt) == 2 * sum(map(len, circles(TEXT_SEED)))


@pytest.mark.long
def test_it_runs_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(speculative.models, "TARGET", Shape(2, 64, 4, 2))
    figures = tmp_path / "figures.json"
    small = ["--answer=48", "--rounds=1", "--batches=2", "--transport=local"]
    monkeypatch.setattr(
        sys, "argv", ["speculative", "--cases=repeats,agrees,never", *small, f"--json={figures}"]
    )
    speculative.main()
    written = json.loads(figures.read_text())
    assert all(row["same_texts"] == 1 and row["same_hits"] for row in written["rows"])
    right = {(row["case"], row["mode"]): row["acceptance"] for row in written["rows"]}
    assert right["repeats", "tree"] > 0.4 and right["agrees", "draft"] > 0.4
    assert not right["never", "draft"]  # none was right, or none was tried
    assert written["paired"]["moved_as_groups_say"]
