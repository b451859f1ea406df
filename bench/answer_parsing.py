"""This benchmark measures what parsing answers costs the router: microseconds a token, beside decoding its
text.

python -m bench.answer_parsing [--tokens=4000] [--rounds=5]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from services.cli.model.make_model import make_model
from services.router.parsing.parser_choice import ParserChoice, choose
from services.router.request.client_request import ChatTools
from services.router.request.parsers import Parsers
from services.router.text.tokenizer import Tokenizer
from services.values.request import SamplingParams

_SENTENCE = "The canal of Corinth is narrow. "
_CALL = '<tool_call>\n{"name": "f", "arguments": {"text": "%s"}}\n</tool_call>'
_TOOLS = ChatTools({"f": {}}, parsed=True)


def answer_of(num_chars: int) -> str:
    part = _SENTENCE * (num_chars // (3 * len(_SENTENCE)))
    return f"<think>\n{part}\n</think>\n\n{part}{_CALL % part}"


def measure(tokenizer: Tokenizer, choice: ParserChoice, num_tokens: int) -> float:
    """Microseconds a token, each of which comes alone."""
    ids = tokenizer.encode(answer_of(num_tokens), special_tokens=False)
    text = Parsers(tokenizer, choice).text_of(_TOOLS, SamplingParams(), [1])
    began = time.perf_counter()
    for token_id in ids:
        text.push((token_id,))
    text.finish()
    return 1e6 * (time.perf_counter() - began) / len(ids)


def choices(tokenizer: Tokenizer) -> Mapping[str, ParserChoice]:
    return {
        "no parser": ParserChoice(),
        "thinking": choose("none", "auto", tokenizer.chat_template, None),
        "thinking and calls": choose("auto", "auto", tokenizer.chat_template, None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as directory:
        make_model(Path(directory), tokenizer="bytes", chat_template="tools")
        tokenizer = Tokenizer(directory)
    for name, choice in choices(tokenizer).items():
        took = [measure(tokenizer, choice, given.tokens) for _ in range(given.rounds)]
        print(f"{name:20} {statistics.median(took):6.1f} us a token ({min(took):.1f} to {max(took):.1f})")


if __name__ == "__main__":
    main()
