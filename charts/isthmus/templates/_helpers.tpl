{{- define "isthmus.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{/* Labels that never change, of one component: {root, component}. */}}
{{- define "isthmus.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "isthmus.labels" -}}
{{ include "isthmus.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "isthmus.metadata" -}}
name: {{ printf "%s-%s%s" (include "isthmus.fullname" .root) .component (.suffix | default "") }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "isthmus.labels" . | nindent 2 }}
{{- end -}}

{{- define "isthmus.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "isthmus.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* The image of a router or worker: {root, values}. */}}
{{- define "isthmus.image" -}}
{{- $own := .values.image | default dict -}}
{{- $for := ternary "sglang" (ternary "cuda" "cpu" (gt (int (.values.gpus | default 0)) 0)) (eq (.values.engine | default "") "sglang") -}}
{{- $tag := $own.tag | default .root.Values.image.tag | default (printf "%s-%s" .root.Chart.AppVersion $for) -}}
{{- $digest := $own.digest | default (index .root.Values.image.digests $for) -}}
{{ printf "%s:%s" ($own.repository | default .root.Values.image.repository) $tag }}{{ with $digest }}@{{ . }}{{ end }}
{{- end -}}

{{/* Is something of `monitoring` on? {root, value} */}}
{{- define "isthmus.monitored" -}}
{{- if eq (toString .value) "true" -}}yes
{{- else if and (eq (toString .value) "auto") (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") -}}yes
{{- end -}}
{{- end -}}
