"""The chart's objects, rendered by real Helm 4, and the command lines in them read by our own config code."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

from services.rank.rank_config import RankConfig
from services.router.router_config import RouterConfig
from services.settings.flags import load

CHART = Path(__file__).parents[2] / "charts" / "isthmus"
SAMPLES = {path.stem: path for path in sorted((CHART / "samples").glob("*.yaml"))}
LEAST: dict[str, Any] = {"model": {"path": "/models/m"}}
NAMES = ("least", *SAMPLES)
OURS = ("router", "prefill", "decode")
RELEASE, NAMESPACE = "isthmus", "llm"
CONFIGS = {"services.router": RouterConfig, "services.prefill": RankConfig, "services.decode": RankConfig}
COMPONENT = "app.kubernetes.io/component"


def sample(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(SAMPLES[name].read_text())
    return values


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Values as Helm merges them: maps key by key, anything else by the last."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = result.get(key)
            both = isinstance(old, dict) and isinstance(value, dict)
            result[key] = merged(old, value) if both else value
    return result


def render(
    values: dict[str, Any], chart: Path = CHART, release: str = RELEASE, namespace: str = NAMESPACE
) -> "Objects":
    """Raises HelmError when the schema or a template refuses the values."""
    with helm_python.Chart.load(chart) as loaded:
        loaded.validate_schema(values)
        texts = loaded.render(values, name=release, namespace=namespace)
    notes = texts.pop("isthmus/templates/NOTES.txt")
    objects = [found for text in texts.values() for found in yaml.safe_load_all(text) if found]
    return Objects(objects, notes, release)


@cache
def rendered(name: str) -> "Objects":
    """A sample, or `least`: nothing but the model's path."""
    return render(LEAST if name == "least" else sample(name))


@dataclass(frozen=True)
class Objects:
    all: list[dict[str, Any]]
    notes: str
    release: str = RELEASE  # one that contains isthmus, so that names begin with it

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        """By name without the release's."""
        found = [item for item in self.all if item["kind"] == kind]
        return {item["metadata"]["name"].removeprefix(f"{self.release}-"): item for item in found}

    def workloads(self) -> dict[str, dict[str, Any]]:
        return self.of("Deployment") | self.of("StatefulSet")

    def pods(self) -> dict[str, dict[str, Any]]:
        """Pod specs by component, the test's included."""
        specs = {name: item["spec"]["template"]["spec"] for name, item in self.workloads().items()}
        for name, item in self.of("LeaderWorkerSet").items():
            specs[name] = item["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        return specs | {name: item["spec"] for name, item in self.of("Pod").items()}

    def container(self, component: str) -> dict[str, Any]:
        (container,) = self.pods()[component]["containers"]
        found: dict[str, Any] = container
        return found

    def arguments(self, component: str, number: int = 0, **injected: str) -> list[str]:
        """Return those that the container of pod `number` gets; `injected` are variables that others add."""
        container = self.container(component)
        variables = {env["name"]: env.get("value") for env in container["env"]}
        variables |= {"POD_NAME": f"{self.release}-{component}-{number}", **injected}
        return [_expand(text, variables) for text in container["args"]]

    def config(self, component: str) -> Any:
        """What the service reads from its command line. SystemExit when it refuses that."""
        interpreter, minus_m, module = self.container(component)["command"]
        assert (interpreter, minus_m) == ("python", "-m")
        return load(CONFIGS[module], self.arguments(component), prog=module)


def _expand(text: str, variables: dict[str, str | None]) -> str:
    """As a kubelet does: $(NAME)."""
    for name, value in variables.items():
        text = text.replace(f"$({name})", value or "")
    assert "$(" not in text, text
    return text
