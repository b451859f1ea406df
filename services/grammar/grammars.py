"""This module prepares constraints for a model's tokens: each is compiled once, and copied for each answer.

First a constraint is converted for llguidance to JSON with a schema, or to a grammar in its dialect of Lark:

    json_object   the schema {"type": "object"}
    json_schema   the schema
    regex         start: /.../
    grammar       the grammar itself, or its conversion from GBNF
    choice        start: CHOICE     CHOICE: "..." | "..."    (of rules there may be 2,000)

JSON has no whitespace between its tokens: where any is allowed, a model to which every word is improbable may
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

# A schema that needs unsupported keywords is refused, whatever its own x-guidance states.
_OPTIONS: Any = {"whitespace_flexible": False, "lenient": False}
# This limits the least common multiple of all multipleOf, without trailing zeros: digits are read with a
# state for each remainder. One of 9,973 takes 0.1 s and 6 MB, one of 999,983 8 s and 350 MB, which no limit
# of the library covers.
_MOST_REMAINDERS = 10_000
_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*(\d[\d.eE+-]{0,30})')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])")
_IS_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*[:\[])", re.MULTILINE)


def lower(constraint: Constraint) -> str:
    """Return the constraint in this form; the compiler checks its meaning.

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

    It is 1 for anything but a number above 0, which the library refuses by name.
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
    except ValueError as error:  # The text is nested too deeply, or has half of a surrogate pair.
        raise constraint.refused(f"cannot be read: {error}") from error


def lark_of(constraint: Constraint) -> str:
    text = fitted_text(constraint)
    if _IS_LARK.search(text) or "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # The library raises bare exceptions.
        problem = " ".join(str(error).split())
        raise constraint.refused(f"cannot be read as GBNF: {problem}") from error


_T = TypeVar("_T")

_KEPT = 64  # Most grammars take 0.1 MB; one of 20 bytes that is made to be large takes 14 MB.
_KEPT_BYTES = 512 << 10  # This limits their texts: 45 KB of classes of characters take 50 MB.
_THREADS = 2
# The limit is a tenth of the library's: the first mask of /a{1000000}/ then takes 12 ms instead of 400.
_LEXER_FUEL = 100_000
_TRIED_TOKENS = 8
_HOPELESS = "allows no text that this model can write"
_DEAD_END = ("NoExtension", "forced bytes")  # The library reports a dead end with these texts.


@dataclass(frozen=True, slots=True)
class GrammarCounts:
    asked: int = 0
    compiled: int = 0
    compile_s: float = 0.0


class Grammars:
    """This has the grammars of one model.

    Any thread may call. The first request also reads the model's vocabulary.
    """

    def __init__(
        self,
        directory: Path | None,
        vocab_size: int,
        *,
        kept: int = _KEPT,
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        """Cache at most `kept` grammars, with at most `kept_bytes` of text.

        `directory` has the model's tokenizer.json; `vocab_size` is that of its logits.
        """
        self._directory = directory
        self._vocab_size = vocab_size
        self._kept = kept
        self._kept_bytes = kept_bytes
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
        """Run `work` in one of a few threads of this object.

        Compiling may take seconds, and must not delay other work in the usual threads, such as tokenizing.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def check(self, constraint: Constraint) -> None:
        self._of(constraint)

    def matcher(
        self, constraint: Constraint, output_ids: Sequence[int] = (), ending_ids: Collection[int] = ()
    ) -> Matcher:
        """Return a matcher that has advanced by `output_ids`, for an answer that `ending_ids` end.

        Raises InvalidRequest where the constraint cannot be read or is not supported, the model has no
        tokenizer.json, or the constraint does not allow `output_ids`.
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
        began = time.perf_counter()
        compiled = _compile(constraint, tokenizer)
        with self._lock:
            self._note(1, time.perf_counter() - began)
            self._keep(constraint, compiled)
        return compiled

    def _keep(self, constraint: Constraint, compiled: LLMatcher) -> None:
        if constraint not in self._compiled:  # Another thread may have been first.
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
    """LLTokenizer reads these attributes of a tokenizer of another library."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        # An extra id after the model's, which belongs to none of its tokens, represents the end.
        self.tokens = [*vocabulary.pieces, b"<end of the text>"]
        self.eos_token_id = len(vocabulary.pieces)
        self.special_token_ids = [*vocabulary.special, self.eos_token_id]
        known = enumerate(vocabulary.pieces)
        self._ids = {piece: i for i, piece in known if piece and i not in vocabulary.special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text that a grammar dictates; a mask then allows these ids alone.

        They are the longest tokens, nearly as a model would write the text. Bytes without a token are left
        out.
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
    """Create llguidance's tokenizer from the vocabulary.

    Its end of text is the id after the vocabulary's last. In a mask that id means that the text is complete.
    """
    tokens = _Tokens(vocabulary)
    return LLTokenizer(tokens, n_vocab=len(tokens.tokens))  # type: ignore[arg-type]


def _compile(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher:
    limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, verbose_errors=False)
    matcher = LLMatcher(tokenizer, lower(constraint), log_level=0, limits=limits)
    if matcher.is_error():
        raise constraint.refused(f"is not supported: {sentence_of(matcher.get_error())}")
    # The first mask builds tables for all copies; the second shows whether that exceeded a limit.
    for _ in range(2):
        _try(constraint, matcher.deep_copy(), tokenizer)
    return matcher


def _try(constraint: Constraint, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Raise InvalidRequest where a text's beginning exceeds the library's limits, or no token writes it."""
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
