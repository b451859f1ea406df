"""SGLang's own API, as far as its bench_serving needs it."""
