{{/* A value as text, in a flag or a manifest. Helm reads whole numbers as floats: 12000000 must not become 1.2e+07. */}}
{{- define "isthmus.flagText" -}}
{{- $text := toString . -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ $text = printf "%.0f" . }}{{- end -}}
{{- end -}}
{{ $text }}
{{- end -}}

{{/* One argument a line; of a list one for each item. */}}
{{- define "isthmus.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $name (include "isthmus.flagText" .) | quote }}
{{- end }}
{{- else }}
- {{ printf "--%s=%s" $name (include "isthmus.flagText" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of several lists of flags what the last states, as JSON. A null states nothing: with it a file of values takes back what one before it set. */}}
{{- define "isthmus.stated" -}}
{{- $stated := dict -}}
{{- range . -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $stated $name $value }}{{ end -}}
{{- end -}}
{{- end -}}
{{ toJson $stated }}
{{- end -}}

{{/* Of every service, then its own: {root, values, own}. `own` is what the chart sets for it. */}}
{{- define "isthmus.arguments" -}}
{{- $values := .root.Values -}}
{{- $set := dict "model" $values.model.path "host" "::" "health-port" 8080 -}}{{/* IPv4's addresses too */}}
{{- $_ := set $set "etcd" (include "isthmus.etcdEndpoints" .root | fromJsonArray) -}}
{{- with $values.tracing.endpoint }}{{ $_ := set $set "otlp-endpoint" . }}{{ end -}}
{{- if $values.tls.secretName -}}
{{- $_ := set $set "tls-ca" "/etc/isthmus/tls/ca.crt" -}}
{{- $_ := set $set "tls-cert" "/etc/isthmus/tls/tls.crt" -}}
{{- $_ := set $set "tls-key" "/etc/isthmus/tls/tls.key" -}}
{{- $_ := set $set "tls-server-name" $values.tls.serverName -}}
{{- if $values.tls.mutual }}{{ $_ := set $set "tls-mutual" true }}{{ end -}}
{{- end -}}
{{- if $values.etcd.tls.secretName -}}
{{- $_ := set $set "etcd-ca" "/etc/isthmus/etcd-tls/ca.crt" -}}
{{- $_ := set $set "etcd-cert" "/etc/isthmus/etcd-tls/tls.crt" -}}
{{- $_ := set $set "etcd-key" "/etc/isthmus/etcd-tls/tls.key" -}}
{{- end -}}
{{- with $values.etcd.external.user }}{{ $_ := set $set "etcd-user" . }}{{ end -}}
{{- if $values.etcd.external.passwordSecret }}{{ $_ := set $set "etcd-password-file" "/etc/isthmus/etcd-password/password" }}{{ end -}}
{{- $_ := set $set "cluster" (include "isthmus.cluster" .root) -}}
{{- include "isthmus.flags" (include "isthmus.stated" (list $values.flags .values.flags .own $set) | fromJson) -}}
{{- end -}}

{{/* Releases that share an etcd, or a Prometheus, are told apart by it. No namespace has a dot; with a dash c in a-b and b-c in a were one. */}}
{{- define "isthmus.cluster" -}}
{{- index .Values.flags "cluster" | default (printf "%s.%s" .Release.Namespace .Release.Name) -}}
{{- end -}}

{{- define "isthmus.etcdEndpoints" -}}
{{- $endpoints := .Values.etcd.external.endpoints -}}
{{- if not $endpoints -}}
{{- $name := printf "%s-etcd" (include "isthmus.fullname" .) -}}
{{- range until (int .Values.etcd.replicas) -}}
{{- $endpoints = append $endpoints (printf "%s-%d.%s.%s.svc:2379" $name . $name $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{ toJson $endpoints }}
{{- end -}}

{{/* {root, values} */}}
{{- define "isthmus.graceSeconds" -}}
{{- $flags := include "isthmus.stated" (list (dict "grace-s" 30) .root.Values.flags .values.flags) | fromJson -}}
{{ int (index $flags "grace-s" | ceil) }}
{{- end -}}

{{/* {root, values} of a worker */}}
{{- define "isthmus.handOverSeconds" -}}
{{- $flags := include "isthmus.stated" (list (dict "hand-over-s" 10) .root.Values.flags .values.flags) | fromJson -}}
{{ int (index $flags "hand-over-s" | ceil) }}
{{- end -}}

{{/*
The grace of requests, then the time in which others take over what is cached, then the 15 s that a supervisor gives
ranks to stop their engines, then what is left. {root, values} of a worker
*/}}
{{- define "isthmus.leavingSeconds" -}}
{{ add (include "isthmus.graceSeconds" . | int) (include "isthmus.handOverSeconds" . | int) 25 }}
{{- end -}}
