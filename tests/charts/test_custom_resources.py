"""Objects of other people's APIs, checked by a compiler against types made from their definitions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from charts.rendering import LEAST, merged, render, rendered
from charts.test_replicas import PLANNED

NODE = Path(sys.prefix) / "node" / "node_modules"
TSC = NODE / ".bin" / "tsc"
MODULES = {
    "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "gateway.networking.k8s.io/v1": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
    "keda.sh/v1alpha1": "@kubernetes-models/keda/keda.sh/v1alpha1",
}

pytestmark = pytest.mark.skipif(not TSC.exists(), reason="the types come from npm, which is not installed")


def source_of(objects):
    lines = []
    for number, item in enumerate(objects):
        kind, module = item["kind"], MODULES[item["apiVersion"]]
        lines.append(f'import type {{ I{kind} as T{number} }} from "{module}/{kind}";')
        lines.append(f"export const item{number}: T{number} = {json.dumps(item)};")
    return "\n".join(lines)


def compile_errors(objects, folder):
    """What the compiler says; an object literal may have no field that its type lacks."""
    (folder / "node_modules").symlink_to(NODE)
    (folder / "objects.ts").write_text(source_of(objects))
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "esnext"]
    command = ["node", TSC, *flags, "--moduleResolution", "bundler", "objects.ts"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def custom(objects):
    return [item for item in objects.all if item["apiVersion"] in MODULES]


def test_every_custom_resource_has_only_fields_that_exist(tmp_path):
    monitored = {"monitoring": {"serviceMonitors": True, "prometheusRules": True}}
    asks = {"autoscaling": {"prometheus": {"triggerAuthentication": "p", "authModes": "bearer"}}}
    alone = render(merged(LEAST, monitored, PLANNED, asks))
    objects = custom(rendered("production")) + custom(alone)
    kinds = {"ServiceMonitor", "HTTPRoute", "BackendTLSPolicy", "ScaledObject"}
    assert {item["kind"] for item in objects} >= kinds
    assert compile_errors(objects, tmp_path) == ""


def test_an_unknown_field_would_be_seen(tmp_path):
    monitor = next(item for item in custom(rendered("production")) if item["kind"] == "ServiceMonitor")
    scaler = next(item for item in custom(render(merged(LEAST, PLANNED))) if item["kind"] == "ScaledObject")
    behavior = {"scaleDown": {"policy": []}}
    path = {"spec": {"advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}}}}
    errors = compile_errors([merged(monitor, {"spec": {"endpoint": []}}), merged(scaler, path)], tmp_path)
    for name in ("endpoint", "policy"):
        assert f'"{name}"\' does not exist in type' in errors
