"""This module opens channels to our servers, and has the options that both ends of a connection use."""

import grpc
import grpc.aio

from services.net.tls import TlsConfig

MAX_MESSAGE_BYTES = 64 * 2**20


def message_options(max_received_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_received_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


# A peer whose host died sends no FIN: pings find out within keepalive time + timeout. A process that was
# killed is known at once without them. So the timeout is what a living peer may be kept from answering:
# on a crowded host an ordinary process waits for its turn for more than 5 s.
_PING_TIMEOUT_MS = 20_000
KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    # It never comes into effect; this is what ends the wait for a ping's answer (grpc/grpc#39239).
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS = [
    *message_options(),
    *KEEPALIVE_OPTIONS,
    # A restarted rank is found again within this, not within gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A channel opened anew tries anew: it must not wait out the backoff of one that failed before.
    ("grpc.use_local_subchannel_pool", 1),
    # Retries are the router's business: it knows what was already yielded.
    ("grpc.enable_retries", 0),
]


def open_channel(endpoint: str, tls: TlsConfig | None = None) -> grpc.aio.Channel:
    """Open a channel to HOST:PORT, which connects at the first call. Raises ConfigError when TLS files are
    bad.
    """
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
    return tls.open_channel(endpoint, _CHANNEL_OPTIONS)
