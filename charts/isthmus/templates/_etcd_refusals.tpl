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
{{- include "isthmus.volumeRefusals" (dict "etcd" $etcd "name" $name "running" $running) -}}
{{- else if $etcd.persistence.enabled -}}
{{- $left := 0 -}}
{{- range $member := until 5 -}}
{{- if lookup "v1" "PersistentVolumeClaim" $.Release.Namespace (printf "data-%s-%d" $name $member) -}}{{ $left = add1 $member | int }}{{- end -}}
{{- end -}}
{{- /* Of a member that is being replaced the claim is deleted. */ -}}
{{- $replaces := and (eq $etcd.initialClusterState "existing") (lt $left $replicas) -}}
{{- if and $left (ne $left $replicas) (not $replaces) -}}
{{- fail (printf "etcd.replicas is %d, and of an earlier %s with %d members the volume claims are left: data of the one is of no use to the other. Set it to that, or delete the claims data-%s-0 and so on first" $replicas $name $left $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Kubernetes changes no volumeClaimTemplates: the upgrade would fail there, with half of it done. {etcd, name, running} */}}
{{- define "isthmus.volumeRefusals" -}}
{{- $wanted := .etcd.persistence -}}
{{- $claims := .running.spec.volumeClaimTemplates -}}
{{- if ne $wanted.enabled (not (empty $claims)) -}}
{{- fail (printf "etcd.persistence.enabled: %s was installed %s volumes, and Kubernetes does not change that. Keep it, or delete that StatefulSet and its volumes first" .name (ternary "without" "with" (empty $claims))) -}}
{{- end -}}
{{- if $claims -}}
{{- $spec := (index $claims 0).spec -}}
{{- $class := $spec.storageClassName | default "" -}}
{{- if ne $class $wanted.storageClassName -}}
{{- fail (printf "etcd.persistence.storageClassName is %q, and the volumes of %s are of %q: Kubernetes does not change that. Keep it, or delete that StatefulSet and its volumes first" $wanted.storageClassName .name $class) -}}
{{- end -}}
{{- $size := toString $spec.resources.requests.storage -}}
{{- if ne (include "isthmus.bytes" $size) (include "isthmus.bytes" $wanted.size) -}}
{{- fail (printf "etcd.persistence.size is %s, and the volumes of %s were made with %s, which Kubernetes does not change in a StatefulSet. To enlarge them, if their storage class can: set spec.resources.requests.storage of each claim data-%s-0 and so on to %s by kubectl patch, then kubectl delete statefulset %s --cascade=orphan, which leaves its pods running, then upgrade" $wanted.size .name $size .name $wanted.size .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A quantity in bytes: what is written 1024Mi Kubernetes gives back as 1Gi. */}}
{{- define "isthmus.bytes" -}}
{{- $unit := regexFind "[A-Za-z]*$" . -}}
{{- $bytes := trimSuffix $unit . | float64 -}}
{{- if eq $unit "m" }}{{ $bytes = divf $bytes 1000 }}{{ end -}}
{{- range $power, $prefix := list "k" "M" "G" "T" "P" "E" -}}
{{- range until (int (add1 $power)) -}}
{{- if eq $unit $prefix }}{{ $bytes = mulf $bytes 1000 }}{{ end -}}
{{- if eq $unit (printf "%si" (upper $prefix)) }}{{ $bytes = mulf $bytes 1024 }}{{ end -}}
{{- end -}}
{{- end -}}
{{ printf "%.0f" $bytes }}
{{- end -}}
