"""These are the settings of the router."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from services.host.ports import check_port
from services.net.channels import TlsConfig
from services.router.parsing.answer_formats import REASONING_PARSERS, TOOL_PARSERS
from services.settings.cluster_config import ClusterConfig
from services.settings.flags import Bounds, setting
from services.settings.named_models import MODEL_HELP
from services.values.errors import ConfigError
from services.values.rank import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ClusterConfig):
    """These settings are those of a router."""

    model: str = setting(help=f"{MODEL_HELP}; its weights are not needed")
    name: str = setting("", "name of this router, unique in the cluster; default: a random one")
    port: int = setting(0, "gRPC port; 0: a free one")
    http_port: int = setting(0, "port of the OpenAI-compatible API; 0: a free one")
    plans: tuple[Literal["remote", "local"], ...] = setting(("remote", "local"), "plans that may be chosen")
    chunk_size: int = setting(
        512,
        "the prefill ranks' --chunk-size, to price the last chunk: 2048 where engine torch has GPUs",
        bounds=Bounds(at_least=1),
    )
    itl_weight: float = setting(
        0.05,
        "weight of the ITL that a request costs running sequences, against its own TTFT",
        bounds=Bounds(at_least=0),
    )
    pull: Literal["on", "off"] = setting("on", "ranks may pull what others hold of a prompt, where that pays")
    max_attempts: int = setting(
        3, "attempts of a request until it makes progress, each on another rank", bounds=Bounds(at_least=1)
    )

    max_wait_s: float = setting(
        600.0,
        "admission control: a request that would queue longer, or for half of its time, is refused",
        bounds=Bounds(above=0),
    )

    request_timeout_s: float = setting(
        3600.0,
        "deadline in seconds of a request whose client has set none",
        bounds=Bounds(above=0),
    )

    heed_deadlines: Literal["on", "off"] = setting(
        "on",
        "of a tenant's waiting requests of one priority the earliest deadline of those that clients have set "
        "goes first, and one that cannot be met is given up before its prompt is computed",
    )

    max_priority: int = setting(
        0,
        "highest priority that a client may request; above 0 it goes first and is never refused for load",
        bounds=Bounds(at_least=0),
    )

    http_keep_alive_s: int = setting(
        120,
        "seconds that an idle HTTP connection stays open: longer than any proxy before us keeps its own",
        bounds=Bounds(at_least=1),
    )

    http_header_timeout_s: float = setting(
        20.0, "seconds in which the head of an HTTP request must arrive", bounds=Bounds(above=0)
    )

    http_body_timeout_s: float = setting(
        60.0, "seconds in which the body of an HTTP request must arrive", bounds=Bounds(above=0)
    )

    http_max_connections: int = setting(
        0,
        "HTTP connections, idle ones too, above which one is refused; 0: half of the open files allowed",
        bounds=Bounds(at_least=0),
    )

    grpc_max_connections: int = setting(
        0,
        "gRPC connections above which one is closed at once; 0: a quarter of the open files allowed",
        bounds=Bounds(at_least=0),
    )

    grpc_idle_s: float = setting(
        300.0,
        "seconds after which a gRPC connection without a call is closed; clients open another",
        bounds=Bounds(at_least=1),
    )

    max_message_bytes: int = setting(
        0,
        "bytes above which a client's message or body is refused; 0: what the model's context can need, at "
        "least 3 MiB",
        bounds=Bounds(at_least=0, at_most=64 << 20),
    )

    max_bytes_in_flight: int = setting(
        256 << 20,
        "bytes of all clients' messages and bodies, until each is answered, above which one is refused",
        bounds=Bounds(at_least=1 << 20),
    )

    max_watchers: int = setting(
        64,
        "streams that watch the cluster (WatchCluster, /v1/cluster/watch) above which one is refused",
        bounds=Bounds(at_least=0),
    )

    coalesce_ms: float = setting(
        50.0,
        "longest wait of tokens for others of their request while the router is short of CPU; 0: never",
        bounds=Bounds(at_least=0, at_most=1000),
    )

    sampling_defaults: Literal["model", "openai"] = setting(
        "model",
        "sampling of requests that set no parameters: by the model's generation_config.json, or OpenAI's",
    )

    tool_parser: str = setting(
        "auto",
        "format of the model's tool calls; auto: as its tokenizer states or its chat template shows, if "
        "known",
        choices=TOOL_PARSERS,
    )

    reasoning_parser: str = setting(
        "auto", "format of the model's thinking; auto: as for tool calls", choices=REASONING_PARSERS
    )

    strict_tools: Literal["keep", "ignore"] = setting(
        "keep",
        "ignore: calls of strict tools follow no schema unless a call is required",
    )

    chat_template: str = setting("", "file of a chat template in Jinja that replaces the model's own")

    control_tokens: Literal["text", "special"] = setting(
        "text",
        "control tokens in a chat's messages (<|im_end|>): plain text, or control tokens, so that who "
        "writes a message can end it",
    )

    images: Literal["refuse", "placeholder"] = setting(
        "refuse",
        "images in HTTP bodies: refused, or each replaced by a text that says so",
    )

    keep_thinking: Literal["template", "always"] = setting(
        "template",
        "thinking of past answers: where the chat template shows it, or always, which keeps prefixes whole",
    )

    allowed_origins: tuple[str, ...] = setting(
        (),
        "origins whose web pages may call the HTTP API, SCHEME://HOST, or * for all (CORS)",
        bounds=Bounds(pattern=r"\*|https?://[^/ ]+", form="SCHEME://HOST or *"),
    )

    page: Literal["on", "off"] = setting(
        "on", "a page at / of the HTTP API: a chat, and what the cluster does with it"
    )

    tls_client_ca: Path | None = setting(
        None,
        "PEM of another authority of clients' certificates, which ranks do not accept. Needs --tls-mutual",
    )

    api_key_file: Path | None = setting(
        None,
        "keys, one a line (KEY, KEY tenant=NAME or KEY operator), of which each request must send one; read "
        "again when it changes",
    )

    jwks_file: Path | None = setting(
        None,
        "public keys (JWKS) of tokens (JWT) that are accepted beside API keys; read again when it changes",
    )

    jwt_audience: str = setting("", "audience (aud) that tokens must name; default: any")
    jwt_issuer: str = setting("", "issuer (iss) that tokens must name; default: any")
    jwt_tenant_claim: str = setting("tenant", "claim of a token that names its tenant")

    tenants: Path | None = setting(
        None,
        "JSON file of tenants: weight, limits, highest priority and cache salt of each; read again when it "
        "changes",
    )

    plan_window_s: float = setting(
        600.0,
        "seconds for which requests are remembered (lengths, times and what begins alike, no text) for "
        "`isthmus plan`; 0: none",
        bounds=Bounds(at_least=0, at_most=86_400),
    )

    plan_ttft_s: float = setting(
        0.0,
        "goal: seconds until a first token; the router plans the ranks that this needs (metrics "
        "isthmus_plan_...); 0: none",
        bounds=Bounds(at_least=0),
    )
    plan_itl_ms: float = setting(
        0.0,
        "goal: milliseconds between two tokens of a request, in the mean; 0: none",
        bounds=Bounds(at_least=0),
    )
    plan_goodput: float = setting(
        0.95,
        "goal: the share of requests that are within these",
        bounds=Bounds(above=0, at_most=0.9999),
    )
    plan_headroom: float = setting(
        1.1,
        "times the load that was seen, for which ranks are planned: it may grow until they are up",
        bounds=Bounds(at_least=1, at_most=10),
    )
    plan_every_s: float = setting(30.0, "seconds between two plans", bounds=Bounds(at_least=1))
    plan_down_s: float = setting(
        300.0, "seconds for which fewer ranks must have been enough to be wanted", bounds=Bounds(at_least=0)
    )

    models: Path | None = setting(
        None,
        "JSON file of further models to serve, and of aliases with weights; read again when it changes",
    )

    def __post_init__(self) -> None:
        ClusterConfig.__post_init__(self)
        check_port("--port", self.port)
        check_port("--http-port", self.http_port)
        if self.jwks_file is None and (self.jwt_audience or self.jwt_issuer):
            raise ConfigError("--jwt-audience and --jwt-issuer need --jwks-file, which turns tokens on")
        if self.plans_ranks and not self.plan_window_s:
            raise ConfigError(
                "--plan-ttft-s and --plan-itl-ms need --plan-window-s, which remembers requests"
            )
        if not self.plans:
            raise ConfigError("--plans must name at least one of remote and local")

    def tls(self) -> TlsConfig | None:
        """Return the TLS settings. Clients' certificates may be from their own authority."""
        tls = ClusterConfig.tls(self)
        if self.tls_client_ca is None:
            return tls
        if tls is None or not tls.mutual:
            raise ConfigError("--tls-client-ca needs --tls-mutual, which requires a certificate of clients")
        return replace(tls, client_ca=self.tls_client_ca)

    @property
    def plans_ranks(self) -> bool:
        return self.plan_ttft_s > 0 or self.plan_itl_ms > 0

    @property
    def served_name(self) -> str:
        return self.model_name or Path(self.model).name

    @property
    def plan_set(self) -> frozenset[Plan]:
        return frozenset(Plan(name) for name in self.plans)
