"""This module has what a client's script tries, one after the other: run in the client's own environment."""

import os
import sys
import traceback

BASE = os.environ["ISTHMUS_URL"]
MODEL = os.environ["ISTHMUS_MODEL"]
DIRECTORY = os.environ["ISTHMUS_MODEL_DIRECTORY"]  # with its tokenizer
QUESTION = "Is it warm in Corinth?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Corinth", "Athens"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def run(*checks):
    """Each prints a line; any that raises fails the script."""
    failed = 0
    for check in checks:
        try:
            check()
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {check.__name__}")
        else:
            print(f"ok {check.__name__}")
    sys.exit(failed > 0)


def is_weather(arguments):
    return arguments["city"] in ("Corinth", "Athens") and arguments["unit"] in ("C", "F")
