"""Whether SGLang would find our plugin."""

from importlib.metadata import entry_points
from importlib.util import find_spec

from services.values.errors import ConfigError


def require_entry_point() -> None:
    """Raises ConfigError. SGLang's processes have our interpreter, but would miss it only after loading."""
    found = entry_points(group="sglang.srt.plugins", name="isthmus")
    if not found:
        raise ConfigError(
            "the plugin is not installed: SGLang finds it by the entry point isthmus of sglang.srt.plugins, "
            "so isthmus must be installed where SGLang is, not only be on the path"
        )
    for plugin in found:
        if not _exists(plugin.module):
            raise ConfigError(
                f"the plugin is installed as {plugin.value}, which does not exist: isthmus has changed, "
                "and must be installed again where SGLang is"
            )


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
