"""Values of flags that no service could work with: both the services and the chart's schema refuse each."""

# Of whom, the flag, the value, what the service says of it.
RANK = [
    ("kv-pages", -5, "--kv-pages must be 1 or more, got -5"),
    ("kv-pages", 0, "--kv-pages must be 1 or more, got 0"),
    ("kv-pages", 2.5, "--kv-pages: expected whole number, got '2.5'"),
    ("kv-pages", "many", "--kv-pages: expected whole number, got 'many'"),
    ("page-size", 0, "--page-size must be 1 or more, got 0"),
    ("page-size", -16, "--page-size must be 1 or more, got -16"),
    ("chunk-size", 0, "--chunk-size must be 1 or more, got 0"),
    ("max-running-requests", 0, "--max-running-requests must be 1 or more, got 0"),
    ("max-running-requests", -1, "--max-running-requests must be 1 or more, got -1"),
    ("num-threads", 0, "--num-threads must be 1 or more, got 0"),
    ("dtype", "int4", "--dtype: expected one of float32, bfloat16, float16, got 'int4'"),
    ("dtype", "fp8", "--dtype: expected one of float32, bfloat16, float16, got 'fp8'"),
    ("decode-cache", "maybe", "--decode-cache: expected one of on, off, got 'maybe'"),
    ("prefill-cache", "yes", "--prefill-cache: expected one of on, off, got 'yes'"),
    ("protected-cache-share", 1.5, "--protected-cache-share is between 0 and 1, got 1.5"),
    ("protected-cache-share", -0.1, "--protected-cache-share is between 0 and 1, got -0.1"),
    ("kv-digest-share", 2, "--kv-digest-share is between 0 and 1, got 2"),
    ("itl-target-ms", 0, "--itl-target-ms must be above 0, got 0"),
    ("itl-target-ms", -40, "--itl-target-ms must be above 0, got -40"),
    ("step-limit-s", -1, "--step-limit-s must be 0 or more, got -1"),
    ("write-lease-s", 0, "--write-lease-s must be above 0, got 0"),
    ("fence-margin-s", -5, "--fence-margin-s must be 0 or more, got -5"),
    ("lease-ttl-s", 0, "--lease-ttl-s must be 1 or more, got 0"),
    ("index-flush-ms", -1, "--index-flush-ms must be 0 or more, got -1"),
    ("index-writes-per-s", 0, "--index-writes-per-s must be above 0, got 0"),
    ("engine-arg", ["page-size=3"], "--engine-arg must be one --flag or --flag=value of SGLang's"),
    ("nixl-backend", "carrier pigeon", "--nixl-backend: expected one of UCX, LIBFABRIC, MOONCAKE, UCCL"),
    ("nixl-parameter", ["device_list"], "--nixl-parameter must be NAME=VALUE, got 'device_list'"),
    ("grace-s", -1, "--grace-s must be 0 or more, got -1"),
    ("grace-s", "long", "--grace-s: expected finite number, got 'long'"),
    ("log-level", "loud", "--log-level: expected one of debug, info, warning, error, got 'loud'"),
    ("trace-sample-ratio", 5, "--trace-sample-ratio is between 0 and 1, got 5"),
]
ROUTER = [
    ("plans", ["near"], "--plans: expected one of remote, local, got 'near'"),
    ("itl-weight", -1, "--itl-weight must be 0 or more, got -1"),
    ("max-attempts", 0, "--max-attempts must be 1 or more, got 0"),
    ("max-wait-s", 0, "--max-wait-s must be above 0, got 0"),
    ("request-timeout-s", -3600, "--request-timeout-s must be above 0, got -3600"),
    ("http-keep-alive-s", 0, "--http-keep-alive-s must be 1 or more, got 0"),
    ("max-priority", -1, "--max-priority must be 0 or more, got -1"),
    ("sampling-defaults", "vllm", "--sampling-defaults: expected one of model, openai, got 'vllm'"),
    ("allowed-origins", ["example.com"], "--allowed-origins must be SCHEME://HOST or *, got 'example.com'"),
]
EVERY_SERVICE = [
    ("index-block", 0, "--index-block must be 1 or more, got 0"),
    ("index-block", -64, "--index-block must be 1 or more, got -64"),
    ("cluster", "a/b", "--cluster must be 1 to 200 letters, digits or ._:@- and start with no sign, got"),
    ("cluster", "-a", "--cluster must be 1 to 200 letters, digits or ._:@- and start with no sign, got"),
]


def command_line(flag, value):
    """As the chart would give it."""
    values = value if isinstance(value, list) else [value]
    return [f"--{flag}={one}" for one in values]
