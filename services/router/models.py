"""A router serves --model, and with --models the models of a file (models_file.py), each with ranks, a
tokenizer and parsers of its own. An alias stands for several of them, or of their adapters (MODEL:NAME).

    request -> Models.take() -> the model it names, or a side of the alias -> its Generator

An alias sends each conversation to one of its sides, by their weights, and always to the same one while that
has usable ranks.
"""

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.index.read.mirror import RankView
from services.router.cluster_messages import ranks_of, unserved_rank
from services.router.dialects.sampling import fill_in
from services.router.request.progress import Progress
from services.router.served_model import Model
from services.values.errors import IsthmusError, NotFound, Unavailable
from services.values.rank import RankId, Role
from services.wire.isthmus.v1 import generation_pb2
from services.wire.isthmus.v1.generation_pb2 import ChatMessage, GenerateRequest

Weights = Mapping[str, float]


def base_of(name: str, models: Iterable[str]) -> str:
    """Return the model that has this name, or whose adapter has (MODEL:NAME); the longest, or ""."""
    return max((each for each in models if name == each or name.startswith(f"{each}:")), key=len, default="")


# -- the sides of an alias ------------------------------------------------------------------------


def sides(weights: Weights, key: bytes) -> list[str]:
    """Return the alias' models in the order in which they may answer what has this key: the first does, and
    each further one if no earlier one can. Those of weight 0 are the last.

    Among all keys a model is first for its share of the weights. A change of weights moves no key between two
    models whose weights stay in proportion (weighted rendezvous hashing).
    """

    def distance(model: str) -> float:
        digest = hashlib.blake2b(key, digest_size=8, person=_digest_of(model)).digest()
        drawn = (int.from_bytes(digest) + 0.5) / 2.0**64
        return -math.log(drawn) / weights[model] if weights[model] else math.inf

    return sorted(sorted(weights), key=distance)


def _digest_of(model: str) -> bytes:
    return hashlib.blake2b(model.encode(), digest_size=hashlib.blake2b.PERSON_SIZE).digest()


def side_key(request: GenerateRequest, past: Callable[[], Sequence[ChatMessage]] = tuple) -> bytes:
    """Return what all requests of a conversation have in common: its id, or its first message of a user. A
    request that has neither is a conversation of its own.

    `past` returns the messages before those of the request.
    """
    if request.conversation_id:
        common = request.conversation_id.encode()
    elif (opening := _opening(request, past)) is not None:
        common = opening.SerializeToString(deterministic=True)
    elif request.WhichOneof("prompt") is None:  # Ids are to be spelled.
        common = b""
    else:
        common = request.request_id.encode() or secrets.token_bytes(8)
    return b"\0".join((request.model.encode(), request.tenant.encode(), common))


def _opening(request: GenerateRequest, past: Callable[[], Sequence[ChatMessage]]) -> ChatMessage | None:
    if request.WhichOneof("prompt") != "chat":
        return None
    messages = chain(past(), request.chat.messages)
    return next((message for message in messages if message.role == "user"), None)


# -- what is served -------------------------------------------------------------------------------


class Models:
    """A router's loop owns it. `default` serves requests for no model, and refuses unknown models."""

    def __init__(self) -> None:
        self._default: Model | None = None
        self._others: Mapping[str, Model] = {}
        self._leaving: list[Model] = []
        self._aliases: Mapping[str, Weights] = {}
        self._failed: frozenset[str] = frozenset()
        self._seen: set[str] = set()  # Ranks of these have been registered.
        self._unserved: Callable[[], Iterable[RankView]] = tuple
        self._listeners: list[Callable[[Progress, str], None]] = []
        # The keys are an alias, a model, and whether the model was the conversation's own.
        self.taken = Counter[tuple[str, str, bool]]()

    def open(self, default: Model) -> None:
        self._default = default

    def set(self, others: Mapping[str, Model], aliases: Mapping[str, Weights], failed: Iterable[str]) -> None:
        """Serve these from now on. Earlier ones answer what they have begun, until `left`."""
        self._leaving += [model for model in self._others.values() if model not in others.values()]
        self._others, self._aliases, self._failed = dict(others), aliases, frozenset(failed)

    def left(self, model: Model) -> None:
        self._leaving.remove(model)

    def watch_unserved(self, ranks: Callable[[], Iterable[RankView]]) -> None:
        """Report these ranks, whose models are not served, in `list_ranks`."""
        self._unserved = ranks

    @property
    def default(self) -> Model:
        assert self._default is not None
        return self._default

    @property
    def others(self) -> Mapping[str, Model]:
        return self._others

    @property
    def failed(self) -> frozenset[str]:
        """Return the names of the models that cannot be opened."""
        return self._failed

    # -- requests ---------------------------------------------------------------------------------

    def take(self, *requests: GenerateRequest, past: Callable[[], Sequence[ChatMessage]] = tuple) -> Model:
        """Return the model that serves the requests, which are of one call. They get the side's name in place
        of an alias, and its sampling defaults. Raises Unavailable."""
        named = requests[0].model
        if (weights := self._aliases.get(named)) is not None:
            side, model = self._side(named, weights, side_key(requests[0], past))
            for request in requests:
                request.model = side
        else:
            model = self._named(named)
        for request in requests:
            fill_in(request.sampling, model.defaults)
        return model

    def _named(self, named: str) -> Model:
        """Return the model of this name, or of MODEL:NAME, or --model, which refuses the others' names."""
        name = base_of(named, (self.default.name, *self._others, *self._failed))
        if name in self._failed and name not in self._others:
            raise self._refused(Unavailable(f"model {name!r} cannot be opened; the router's log says why"))
        return self._others.get(name, self.default)

    def _side(self, alias: str, weights: Weights, key: bytes) -> tuple[str, Model]:
        names = sides(weights, key)
        opened = [(name, model) for name in names if (model := self._opened(name)) is not None]
        if not opened:
            raise self._refused(Unavailable(f"no model of alias {alias!r} can be opened"))
        name, model = next((side for side in opened if _is_usable(side[1], side[0])), opened[0])
        self.taken[alias, name, name == names[0]] += 1
        return name, model

    def _opened(self, side: str) -> Model | None:
        name = base_of(side, (self.default.name, *self._others, *self._failed))
        return self.default if name == self.default.name else self._others.get(name)

    def _refused(self, error: IsthmusError) -> IsthmusError:
        self.rejected(error)
        return error

    def is_alias(self, name: str) -> bool:
        return name in self._aliases

    def rejected(self, error: IsthmusError) -> None:
        """Count a request that no model received."""
        self.default.generator.rejected(error)

    def is_running(self, tenant: str, request_id: str) -> bool:
        return any(model.generator.is_running(tenant, request_id) for model in self._all())

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Abort as a Generator does, in all models."""
        return any([model.generator.abort(request_id, tenant) for model in self._all()])

    @property
    def running(self) -> Sequence[Progress]:
        return [progress for model in self._all() for progress in model.generator.running]

    def listen(self, ended: Callable[[Progress, str], None]) -> Callable[[], None]:
        """Call `ended` as a Generator does, for the requests of all models."""
        self._listeners.append(ended)
        return partial(self._listeners.remove, ended)

    def ended(self, progress: Progress, outcome: str) -> None:
        """Tell the listeners; every model's Generator calls this."""
        for ended in self._listeners:
            ended(progress, outcome)

    def _all(self) -> Iterator[Model]:
        yield self.default
        yield from self._others.values()
        yield from self._leaving

    # -- what is told -----------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise Unavailable, with the reason, while no model has a rank that could take a request."""
        if not any(map(_is_usable, self._others.values())):
            self.default.generator.check_usable()

    def context_tokens(self) -> int | None:
        """Return the longest context of any model, or None where it is not known."""
        known = [model.generator.context_tokens() for model in (self.default, *self._others.values())]
        return max((context for context in known if context is not None), default=None)

    def note_ranks(self) -> None:
        """Remember whose ranks are registered."""
        for name, model in self._others.items():
            if name not in self._seen and any(model.cluster.ranks(role) for role in Role):
                self._seen.add(name)

    def served_names(self) -> list[str]:
        """Return --model's name, those of models whose ranks are or were registered, and all aliases."""
        self.note_ranks()
        names = [self.default.name, *(name for name in self._others if name in self._seen)]
        known = [self.default.name, *self._others, *self._failed]
        return names + [
            alias
            for alias, weights in self._aliases.items()
            if any(base_of(side, known) in names for side in weights)
        ]

    def list_models(self) -> generation_pb2.ListModelsResponse:
        """Return the models of `served_names`. An alias has all ranks of its sides, and the least context."""
        names = self.served_names()
        listed = {model.id: model for model in self.default.generator.list_models().models}
        for name in names:
            if name in self._others:
                for model in self._others[name].generator.list_models().models:
                    listed[model.id] = model
        for alias in filter(self.is_alias, names):
            models = [listed[name] for name in self._aliases[alias] if name in listed]
            contexts = [model.max_context_tokens for model in models if model.max_context_tokens]
            listed[alias] = generation_pb2.Model(
                id=alias,
                max_context_tokens=min(contexts, default=0),
                prefill_ranks=_number(models, lambda model: model.prefill_ranks),
                decode_ranks=_number(models, lambda model: model.decode_ranks),
            )
        return generation_pb2.ListModelsResponse(models=listed.values())

    def dead(self, incarnation: RankId) -> None:
        """Let the cluster of its model forget a rank that fails health checks."""
        for model in self._all():
            if model.cluster.has(incarnation):
                model.cluster.dead(incarnation)
                return
        self.default.cluster.dead(incarnation)

    def list_ranks(self) -> generation_pb2.ListRanksResponse:
        told = ranks_of(self.default.cluster)
        for model in self._others.values():
            told.ranks.extend(ranks_of(model.cluster).ranks)
        told.ranks.extend(map(unserved_rank, self._unserved()))
        return told


def _number(models: Sequence[generation_pb2.Model], ranks: Callable[[generation_pb2.Model], int]) -> int:
    """Return how many ranks the models have together: those with a model's adapter are among its own."""
    of_base: dict[str, int] = {}
    for model in models:
        base = model.base or model.id
        of_base[base] = max(of_base.get(base, 0), ranks(model))
    return sum(of_base.values())


def _is_usable(model: Model, name: str = "") -> bool:
    """Return whether the model, or its adapter of this name, has ranks that could take a request."""
    try:
        model.generator.check_usable(name)
    except (Unavailable, NotFound):
        return False
    return True


class ModelsCollector(Collector):
    """Its series are bounded by the file: an alias that it names no more keeps its counts."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        served = GaugeMetricFamily(
            "isthmus_model_served",
            "1 while the router can serve the model of --models; 0 while it cannot open it.",
            labels=("model",),
        )
        for name in self._models.others.keys() | self._models.failed:
            served.add_metric((name,), name in self._models.others and name not in self._models.failed)
        taken = CounterMetricFamily(
            "isthmus_alias_calls",
            "Calls that named an alias, by the model that took them: the conversation's own, or another "
            "while that had no usable rank.",
            labels=("alias", "model", "side"),
        )
        for (alias, model, is_own), number in self._models.taken.items():
            taken.add_metric((alias, model, "own" if is_own else "other"), number)
        yield served
        yield taken
