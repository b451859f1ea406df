"""NIXL's agent where there is no GPU: SGLang calls the memory of states VRAM wherever it is."""

from typing import Any


class HostAgent:
    """The agent, for which all memory is the host's."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def register_memory(self, *args: Any, **kwargs: Any) -> Any:
        return self._agent.register_memory(*map(_on_host, args), **kwargs)

    def get_xfer_descs(self, *args: Any, **kwargs: Any) -> Any:
        return self._agent.get_xfer_descs(*map(_on_host, args), **kwargs)

    def prep_xfer_dlist(self, *args: Any, **kwargs: Any) -> Any:
        return self._agent.prep_xfer_dlist(*map(_on_host, args), **kwargs)


def _on_host(argument: Any) -> Any:
    return "DRAM" if isinstance(argument, str) and argument == "VRAM" else argument
