{{/* What would cost the chart's own etcd its quorum: its members keep in their data who the others are, and by which URLs. */}}
{{- define "isthmus.etcdRefusals" -}}
{{- $etcd := .Values.etcd -}}
{{- $replicas := int $etcd.replicas -}}
{{- if and (not $etcd.persistence.enabled) (ne $replicas 1) -}}
{{- fail (printf "etcd.replicas is %d: without etcd.persistence a member that is replaced can never join the others again; set it to 1" $replicas) -}}
{{- end -}}
{{- $name := printf "%s-etcd" (include "isthmus.fullname" .) -}}
{{- $running := lookup "apps/v1" "StatefulSet" .Release.Namespace $name -}}
{{- if $running -}}
{{- if ne (int $running.spec.replicas) $replicas -}}
{{- fail (printf "etcd.replicas is %d, and %s has %d members: that is fixed at the first install. Keep it, or delete that StatefulSet and its volumes first" $replicas $name (int $running.spec.replicas)) -}}
{{- end -}}
{{- $hasTls := has "--peer-client-cert-auth=true" (index $running.spec.template.spec.containers 0).args -}}
{{- if and (gt $replicas 1) (ne $hasTls (ne $etcd.tls.secretName "")) -}}
{{- fail (printf "etcd.tls.secretName: the members of %s know each other %s TLS, and would never agree again: that is fixed at the first install. Keep it, or delete that StatefulSet and its volumes first" $name (ternary "with" "without" $hasTls)) -}}
{{- end -}}
{{- else if $etcd.persistence.enabled -}}
{{- $left := 0 -}}
{{- range $member := until 5 -}}
{{- if lookup "v1" "PersistentVolumeClaim" $.Release.Namespace (printf "data-%s-%d" $name $member) -}}{{ $left = add1 $member | int }}{{- end -}}
{{- end -}}
{{- if and $left (ne $left $replicas) -}}
{{- fail (printf "etcd.replicas is %d, and of an earlier %s with %d members the volume claims are left: data of the one is of no use to the other. Set it to that, or delete the claims data-%s-0 and so on first" $replicas $name $left $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
