"""lm-eval with a task of our own, which nothing is downloaded for."""

import json
import os
import tempfile
from pathlib import Path

from checks import BASE, DIRECTORY, MODEL, run

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": tempfile.mkdtemp()}

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

FOLDER = Path(tempfile.mkdtemp())
DATA = FOLDER / "questions.jsonl"
QUESTIONS = [
    {"question": f"What is {n} x 7?", "choices": ["6", str(7 * n), "a number"], "gold": 1}
    for n in range(2, 8)
]
DATA.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
output_type: {kind}
"""
CHOOSES = (
    TASK
    + """
doc_to_choice: choices
doc_to_target: gold
metric_list: [{{metric: acc}}]
"""
)
GENERATES = (
    TASK
    + """
doc_to_target: "{{{{choices[1]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""
)
for name, text, kind in (
    ("chooses", CHOOSES, "multiple_choice"),
    ("generates", GENERATES, "generate_until"),
):
    (FOLDER / f"{name}.yaml").write_text(text.format(name=name, data=DATA, kind=kind))


def evaluated(model, task, batch_size, **more):
    """What the model answered, question by question."""
    path = "chat/completions" if "chat" in model else "completions"
    arguments = {"model": MODEL, "base_url": f"{BASE}/v1/{path}", "tokenizer": DIRECTORY, "max_retries": 1}
    results = simple_evaluate(
        model,
        model_args={**arguments, **more},
        tasks=[task],
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        batch_size=batch_size,
        apply_chat_template="chat" in model,
    )
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    assert len(samples) == 6
    return [sample["filtered_resps"] for sample in samples]


def generate_until_in_batches_of_four():
    answers = evaluated("local-completions", "generates", 4)
    assert all(text for (text,) in answers)
    assert answers == evaluated("local-completions", "generates", 1)


def loglikelihood_in_batches_of_four():
    scores = evaluated("local-completions", "chooses", 4)
    assert all(logprob < 0 for row in scores for logprob, _ in row)
    for row, alone in zip(scores, evaluated("local-completions", "chooses", 1), strict=True):
        for (logprob, is_greedy), (again, was_greedy) in zip(row, alone, strict=True):
            assert abs(logprob - again) < 1e-4 and is_greedy == was_greedy


def loglikelihood_of_texts():
    assert len(evaluated("local-completions", "chooses", 4, tokenized_requests=False)) == 6


def generate_until_in_chats():
    answers = evaluated("local-chat-completions", "generates", 1, num_concurrent=4)
    assert all(isinstance(text, str) for (text,) in answers)


run(
    generate_until_in_batches_of_four,
    loglikelihood_in_batches_of_four,
    loglikelihood_of_texts,
    generate_until_in_chats,
)
