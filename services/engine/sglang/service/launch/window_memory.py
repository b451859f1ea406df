"""What SGLang does with windows and states, and what of it SGLang itself is asked before it is started."""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress

from services.host.parent_death import dying_with_us
from services.values.errors import ConfigError, Unavailable

_MODULE = "services.engine.sglang.inside.window_memory"

# Of stock SGLang 0.5.23: a node of its tree is a hit only if every component has there what it needs.
WINDOW_MEMORY_SAID = (
    "windows' KV is in memory of its own, as asked for: prompts that begin alike and then differ find "
    "nothing on decode, and a conversation whose window was evicted finds less than attention holds"
)
RECURRENT_SAID = (
    "SGLang's decode finds a prefix only where it kept a state: at the end of an answer, at multiples of "
    "--mamba-track-interval; prompts that begin alike and then differ find nothing, whatever attention holds"
)


async def has_window_memory(model_path: str, environment: Mapping[str, str]) -> bool:
    """Whether SGLang would keep windows' KV in memory of its own, by its own list of architectures.

    Loads SGLang's libraries in a child process: seconds.

    Raises:
        ConfigError: it gives no answer.
        Unavailable: it was killed; memory may be short.
    """
    process = await asyncio.create_subprocess_exec(
        *dying_with_us([sys.executable, "-m", _MODULE, model_path]),
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    if (process.returncode or 0) < 0:
        raise Unavailable(f"what asks SGLang about this model's windows ended with {process.returncode}")
    answers = {"true": True, "false": False}
    answer = (output.decode(errors="replace").split() or [""])[-1]
    if process.returncode or answer not in answers:
        last = (errors.decode(errors="replace").strip().splitlines() or ["it wrote nothing"])[-1]
        raise ConfigError(f"SGLang does not say what it does with this model's windows: {last}")
    return answers[answer]
