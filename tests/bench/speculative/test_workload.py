"""Texts that are guessed as often as their case says."""

import json
import random
import sys
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.speculative import __main__ as speculative
from bench.speculative import real_text
from bench.speculative.models import DRAFT, Shape, circles, successors, write
from bench.speculative.real_text import RealText
from bench.speculative.workload import CASES, RIGHT, TEXT_SEED, conversations, request, text
from services.cli.model.make_model import make_model
from services.values.rank import Plan

pytestmark = pytest.mark.long


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


def test_models_and_prompts(subtests, tmp_path_factory):
    for share in [RIGHT, 0.5, 0.0]:
        with subtests.test("a model follows its circles as often as is said", share=share):
            tmp_path = tmp_path_factory.mktemp("case")
            write(tmp_path, DRAFT, share=share, seed=TEXT_SEED)
            model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
            ids = list(text(share, 200, random.Random(1)))
            with torch.inference_mode():
                chances = model(torch.tensor([ids])).logits[0].softmax(-1)
            follows = successors(TEXT_SEED)
            mean = sum(float(chances[at, follows[i]]) for at, i in enumerate(ids)) / len(ids)
            assert mean == pytest.approx(share, abs=0.06)
    with subtests.test("a prompt that recites shows every circle twice"):
        case = next(case for case in CASES if case.recites)
        (talk,) = conversations(case, 1, 2, seed=3)
        prompt, follows = talk.questions[0], successors(TEXT_SEED)
        shown = {a: [] for a in follows}
        for a, b in pairwise(prompt):
            shown[a].append(b)
        assert all(following.count(follows[a]) >= 1 for a, following in shown.items())
        assert len(prompt) == 2 * sum(map(len, circles(TEXT_SEED)))
    # Questions, and answers between them, are what the chat template makes of the whole conversation.
    with subtests.test("real text is a chat whose turns join"):
        tmp_path = tmp_path_factory.mktemp("case")
        make_model(tmp_path, tokenizer="bytes", chat_template="tools")
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": 256, "temperature": 0.2}')
        tokenizer, real = AutoTokenizer.from_pretrained(tmp_path), RealText(tmp_path)
        for case in real_text.CASES:
            one, other = real.conversations(case, 2, 2, seed=1)
            assert one.questions != other.questions and len(one.questions) == 2
            assert (one.salt == other.salt) == (case.name == "again")
            assert one.sampling.temperature == 0.2 and one.ends == (256,)
            asked = request("r", one, one.questions[0], 8, Plan.LOCAL)
            assert (
                asked.eos_token_ids == (256,) and not asked.sampling.ignore_eos and asked.sampling.top_p == 1
            )
            first, second = (tokenizer.decode(question) for question in one.questions)
            asked = real_text._QUESTIONS["chat" if case.name == "again" else case.name]
            questions = next(pair for pair in asked if pair[0] in first)
            chat = [("user", questions[0]), ("assistant", "So."), ("user", questions[1])]
            messages = [{"role": role, "content": content} for role, content in chat]
            whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert f"{first}So.{second}" == whole


def test_real_text_runs_and_loses_nothing(tmp_path, monkeypatch):
    model, figures = tmp_path / "model", tmp_path / "figures.json"
    make_model(model, tokenizer="bytes", chat_template="tools")
    small = ["--answer=24", "--rounds=1", "--batches=1", "--kv-pages=256", "--cases=chat,again"]
    monkeypatch.setattr(sys, "argv", ["speculative", f"--model={model}", *small, f"--json={figures}"])
    speculative.main()
    written = json.loads(figures.read_text())
    assert [row["case"] for row in written["rows"]] == ["chat", "chat", "again", "again"]
    assert all(row["same_texts"] == 1 and row["same_hits"] for row in written["rows"])
    assert written["settings"]["model"] == "model" and all(goal["met"] for goal in written["goals"])
