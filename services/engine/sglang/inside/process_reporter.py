"""The one Reporter of a process of SGLang's."""

from functools import cache

from services.engine.sglang.plugin_settings import PluginSettings
from services.engine.sglang.reports import Reporter


@cache
def process_reporter() -> Reporter:
    """Connected at the first call."""
    return Reporter(PluginSettings.from_environment().reports_path)
