"""Constraints are made ready for a model's tokens here: compiled once, and begun anew for each answer.

First a constraint is put into llguidance's words: JSON with a schema, or a grammar in its dialect of Lark.

    json_object   the schema {"type": "object"}
    json_schema   the schema
    regex         start: /.../
    grammar       as it is, or made of GBNF
    choice        start: CHOICE     CHOICE: "..." | "..."    of rules there may be 2,000

JSON has no whitespace between its tokens: where any is allowed, a model that likes none of the words may
write blanks until it is stopped.
"""

import asyncio
import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from services.grammar.json_schema import fitted_text
from services.grammar.matcher import EndingIds, Matcher, sentence_of
from services.grammar.vocabulary import Vocabulary, read_vocabulary
from services.values.errors import ConfigError, InvalidRequest
from services.values.request import Constraint, ConstraintKind

# A schema that asks what is not supported is refused, whatever its own x-guidance says.
_OPTIONS: Any = {"whitespace_flexible": False, "lenient": False}
# The limit is for all multipleOf together, trailing zeros left out: digits are read with a state for each
# remainder. One of 9,973 takes 0.1 s and 6 MB, one of 999,983 8 s and 350 MB, which no limit of the library's
# sees.
_MOST_REMAINDERS = 10_000
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*(\d[\d.eE+-]{0,30})')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")
_IS_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*[:\[])", re.MULTILINE)


def lower(constraint: Constraint) -> str:
    """Return the constraint in these words; whoever compiles it looks at what it means.

    Raises InvalidRequest where it cannot be read.
    """
    _check_remainders(constraint)
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_OPTIONS)
        case ConstraintKind.JSON_SCHEMA:
            return _of_schema(constraint)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.CHOICE:
            alternatives = " | ".join(map(json.dumps, dict.fromkeys(constraint.texts)))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(lark_of(constraint))


def _check_remainders(constraint: Constraint) -> None:
    if constraint.kind not in (ConstraintKind.JSON_SCHEMA, ConstraintKind.GRAMMAR):
        return
    text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), constraint.text)
    if math.lcm(*map(_significand, set(_MULTIPLE_OF.findall(text)))) > _MOST_REMAINDERS:
        raise constraint.refused(
            f"is not supported: the least common multiple of all multipleOf is above {_MOST_REMAINDERS}"
        )


def _significand(number: str) -> int:
    """Return the number without trailing zeros.

    What is no number above 0 gives 1: the library refuses it by name.
    """
    try:
        digits = Decimal(number).normalize().as_tuple().digits
    except ArithmeticError:
        return 1
    return int("".join(map(str, digits))) or 1


def _of_schema(constraint: Constraint) -> str:
    text = fitted_text(constraint)
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
    except ValueError as error:  # the text is nested too deeply, or has half of a surrogate pair
        raise constraint.refused(f"cannot be read: {error}") from error


def lark_of(constraint: Constraint) -> str:
    text = fitted_text(constraint)
    if _IS_LARK.search(text) or "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the library raises bare exceptions
        problem = " ".join(str(error).split())
        raise constraint.refused(f"cannot be read as GBNF: {problem}") from error


_T = TypeVar("_T")

_KEPT = 64  # Most grammars take 0.1 MB; one of 20 bytes that is made to be large takes 14.
_KEPT_BYTES = 512 << 10  # This limits their texts: 45 KB of classes of characters take 50 MB.
_THREADS = 2
# The limit is a tenth of the library's: /a{1000000}/ then costs its first mask 12 ms instead of 400.
_LEXER_FUEL = 100_000
_TRIED_TOKENS = 8
_HOPELESS = "allows no text that this model can write"
_DEAD_END = ("NoExtension", "forced bytes")  # The library says these of a dead end.


@dataclass(frozen=True, slots=True)
class GrammarCounts:
    asked: int = 0
    compiled: int = 0
    compile_s: float = 0.0


class Grammars:
    """The grammars are those of one model.

    Any thread may call. The first request takes as long as reading the model's vocabulary does.
    """

    def __init__(
        self,
        directory: Path | None,
        vocab_size: int,
        *,
        kept: int = _KEPT,
        kept_bytes: int = _KEPT_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Remember `kept` grammars at most, and `kept_bytes` of their texts.

        `directory` has the model's tokenizer.json; `vocab_size` is that of its logits.
        """
        self._directory = directory
        self._vocab_size = vocab_size
        self._kept = kept
        self._kept_bytes = kept_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._compiled_bytes = 0
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._counts = GrammarCounts()

    @property
    def counts(self) -> GrammarCounts:
        return self._counts

    async def beside(self, work: Callable[..., _T], *arguments: object) -> _T:
        """Run `work` in one of a few threads of our own.

        Compiling may take seconds, and must not hold up whoever only reads or tokenizes in a thread.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def check(self, constraint: Constraint) -> None:
        self._of(constraint)

    def matcher(
        self, constraint: Constraint, output_ids: Sequence[int] = (), ending_ids: Collection[int] = ()
    ) -> Matcher:
        """Return a matcher that has come as far as `output_ids`, of an answer that `ending_ids` end.

        Raises:
            InvalidRequest: the constraint cannot be read or asks what is not supported, the model has no
                tokenizer.json, or `output_ids` are not what the constraint allows.
        """
        matcher = Matcher(self._of(constraint).deep_copy(), EndingIds(ending_ids, self._vocab_size))
        matcher.advance(output_ids)
        return matcher

    def _of(self, constraint: Constraint) -> LLMatcher:
        with self._lock:
            compiled = self._compiled.get(constraint)
            if compiled is not None:
                self._compiled.move_to_end(constraint)
                self._note(0, 0.0)
                return compiled
            tokenizer = self._open_tokenizer()
        began = self._clock()
        compiled = _compile(constraint, tokenizer)
        with self._lock:
            self._note(1, self._clock() - began)
            self._keep(constraint, compiled)
        return compiled

    def _keep(self, constraint: Constraint, compiled: LLMatcher) -> None:
        if constraint not in self._compiled:  # another thread may have been first
            self._compiled_bytes += constraint.size_bytes
        self._compiled[constraint] = compiled
        while len(self._compiled) > self._kept or self._compiled_bytes > self._kept_bytes:
            oldest, _ = self._compiled.popitem(last=False)
            self._compiled_bytes -= oldest.size_bytes

    def _note(self, compiled: int, took_s: float) -> None:
        counts = self._counts
        self._counts = GrammarCounts(counts.asked + 1, counts.compiled + compiled, counts.compile_s + took_s)

    def _open_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            if self._directory is None:
                raise InvalidRequest("sampling.constraint", "cannot be used: there is no tokenizer here")
            try:
                self._tokenizer = open_tokenizer(read_vocabulary(self._directory, self._vocab_size))
            except ConfigError as error:
                raise InvalidRequest(
                    "sampling.constraint", f"cannot be used with this model: {error}"
                ) from error
        return self._tokenizer


class _Tokens:
    """LLTokenizer reads these attributes of a tokenizer that is none of its own."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        # One id more than the model's, which none of its tokens is, stands for the end.
        self.tokens = [*vocabulary.pieces, b"<end of the text>"]
        self.eos_token_id = len(vocabulary.pieces)
        self.special_token_ids = [*vocabulary.special, self.eos_token_id]
        known = enumerate(vocabulary.pieces)
        self._ids = {piece: i for i, piece in known if piece and i not in vocabulary.special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text that a grammar dictates; a mask then allows these ids alone.

        They are the longest tokens, as a model would write the text, or nearly so. Bytes that no token has
        are left out.
        """
        octets, ids, start = text.encode(), list[int](), 0
        while start < len(octets):
            piece = self._piece_at(octets, start)
            if piece:
                ids.append(self._ids[piece])
            start += len(piece) or 1
        return ids

    def _piece_at(self, octets: bytes, start: int) -> bytes:
        ends = range(min(len(octets), start + self._longest), start, -1)
        return next((octets[start:end] for end in ends if octets[start:end] in self._ids), b"")


def open_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Make llguidance's tokenizer of the vocabulary.

    Its end of text is the id behind the vocabulary's last. In a mask that id says that the text is whole.
    """
    tokens = _Tokens(vocabulary)
    return LLTokenizer(tokens, n_vocab=len(tokens.tokens))  # type: ignore[arg-type]


def _compile(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, verbose_errors=False)
    matcher = LLMatcher(tokenizer, lower(constraint), log_level=0, limits=limits)
    if matcher.is_error():
        raise constraint.refused(f"is not supported: {sentence_of(matcher.get_error())}")
    for _ in range(2):  # the first mask builds for all copies; the second shows what was too much for it
        _try(constraint, matcher.deep_copy(), tokenizer)
    return matcher


def _try(constraint: Constraint, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Raise InvalidRequest where a text's beginning asks too much of the library, or what no token writes."""
    is_forced = True
    for _ in range(_TRIED_TOKENS):
        allowed = _allowed(matcher)
        if not allowed or matcher.is_error():
            break
        is_forced = is_forced and allowed.bit_count() == 1
        token_id = (allowed & -allowed).bit_length() - 1
        if token_id == tokenizer.vocab_size - 1:
            return
        if not matcher.consume_token(token_id):
            break
    else:
        return
    problem = sentence_of(matcher.get_error())
    if problem and not any(sign in problem for sign in _DEAD_END):
        raise constraint.refused(f"is not supported: {problem}")
    if is_forced:
        raise constraint.refused(_HOPELESS)


def _allowed(matcher: LLMatcher) -> int:
    try:
        return int.from_bytes(matcher.compute_bitmask(), "little")
    except ValueError:
        return 0
