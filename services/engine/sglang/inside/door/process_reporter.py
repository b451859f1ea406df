"""The one Reporter of a process of SGLang's."""

from functools import cache

from services.engine.sglang.inside.door.reporter import Reporter
from services.engine.sglang.plugin_settings import PluginSettings


@cache
def process_reporter() -> Reporter:
    """Connected at the first call."""
    return Reporter(PluginSettings.from_environment().reports_path)
