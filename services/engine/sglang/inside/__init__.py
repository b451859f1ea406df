"""This package runs in SGLang's own processes, as its NIXL classes and beside its schedulers."""
