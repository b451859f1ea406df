{{/* What the pods of routers and workers have in common: {root, component, values}. */}}
{{- define "isthmus.podMetadata" -}}
labels: # without versions: a new chart alone restarts nobody
  {{- include "isthmus.selector" . | nindent 2 }}
  {{- with .values.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with .values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "isthmus.podSettings" -}}
serviceAccountName: {{ include "isthmus.serviceAccount" .root }}
automountServiceAccountToken: false
shareProcessNamespace: true # else the service is process 1, and no SIGTERM reaches it until Python has begun
{{- include "isthmus.placement" . }}
{{- if .values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet # else the node's resolver, which knows no Service
{{- end }}
{{- if .values.hostIPC }}
hostIPC: true
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .values.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "isthmus.placement" }}
securityContext:
  {{- include "isthmus.podSecurity" . | nindent 2 }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- $selector := dict "matchLabels" (include "isthmus.selector" . | fromYaml) }}
  {{- range .values.topologySpreadConstraints }}
  - {{- merge (dict "labelSelector" $selector) . | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* What a release says of its own counts, key by key: {values}. */}}
{{- define "isthmus.podSecurity" -}}
{{- $ours := dict "runAsNonRoot" true "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001 -}}
{{- $_ := set $ours "fsGroupChangePolicy" "OnRootMismatch" -}}
{{- $_ := set $ours "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- include "isthmus.laidOver" (dict "ours" $ours "theirs" .values.podSecurityContext) -}}
{{- end -}}

{{/* {ours, theirs}: key by key; a null takes a key away, as merging would not. */}}
{{- define "isthmus.laidOver" -}}
{{- $result := deepCopy .ours -}}
{{- range $key, $value := .theirs -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $result $key -}}
{{- else if kindIs "map" $value -}}
{{- $_ := set $result $key (mergeOverwrite (get $result $key | default dict) $value) -}}
{{- else -}}
{{- $_ := set $result $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $result -}}
{{- end -}}

{{- define "isthmus.containerSecurity" -}}
{{- $capabilities := dict "drop" (list "ALL") -}}
{{- if (.values.rdma | default dict).ipcLock }}{{ $_ := set $capabilities "add" (list "IPC_LOCK") }}{{ end -}}
{{- $ours := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" $capabilities -}}
{{- include "isthmus.laidOver" (dict "ours" $ours "theirs" .values.securityContext) -}}
{{- end -}}

{{/* Start-up until the model is loaded, then readiness while requests are taken, liveness while a restart is no help. */}}
{{- define "isthmus.probes" -}}
startupProbe:
  httpGet: {path: /startup, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int .values.startupSeconds) 4) 5 }}
readinessProbe:
  httpGet: {path: /ready, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /live, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{- define "isthmus.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: HOME, value: /tmp} # where libraries keep caches
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "isthmus.volumeMounts" -}}
{{- $values := .root.Values -}}
- {name: tmp, mountPath: /tmp}
{{- if eq $values.model.source "volume" }}
- {name: model, mountPath: {{ $values.model.mountPath | quote }}, readOnly: true}
{{- else if ne $values.model.source "image" }}
- {name: model, mountPath: {{ $values.model.path | quote }}, readOnly: true}
{{- end }}
{{- if .values.sharedMemory }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- if $values.tls.secretName }}
- {name: tls, mountPath: /etc/isthmus/tls, readOnly: true}
{{- end }}
{{- if and (eq .component "router") $values.tls.clientCaConfigMap }}
- {name: client-ca, mountPath: /etc/isthmus/client-ca, readOnly: true}
{{- end }}
{{- if $values.etcd.tls.secretName }}
- {name: etcd-tls, mountPath: /etc/isthmus/etcd-tls, readOnly: true}
{{- end }}
{{- if $values.etcd.external.passwordSecret }}
- {name: etcd-password, mountPath: /etc/isthmus/etcd-password, readOnly: true}
{{- end }}
{{- if .values.apiKeysSecret }}
- {name: api-keys, mountPath: /etc/isthmus/api-keys, readOnly: true}
{{- end }}
{{- if .values.tenantsSecret }}
- {name: tenants, mountPath: /etc/isthmus/tenants, readOnly: true}
{{- end }}
{{- if .values.models }}
- {name: models, mountPath: /etc/isthmus/models, readOnly: true}
{{- end }}
{{- if dig "tiers" "file" "size" "" .values }}
- {name: tier, mountPath: /var/lib/isthmus/tier}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "isthmus.volumes" -}}
{{- $values := .root.Values -}}
- {name: tmp, emptyDir: {}}
{{- if eq $values.model.source "hostPath" }}
- name: model
  hostPath: {path: {{ $values.model.path | quote }}, type: Directory}
{{- else if eq $values.model.source "volume" }}
- name: model
  {{- toYaml $values.model.volume | nindent 2 }}
{{- else if eq $values.model.source "generated" }}
- {name: model, emptyDir: {}}
{{- end }}
{{- with .values.sharedMemory }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ include "isthmus.flagText" . }}}
{{- end }}
{{- with $values.tls.secretName }}
- name: tls
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- if and (eq .component "router") $values.tls.clientCaConfigMap }}
- name: client-ca
  configMap: {name: {{ $values.tls.clientCaConfigMap | quote }}}
{{- end }}
{{- with $values.etcd.tls.secretName }}
- name: etcd-tls
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- with $values.etcd.external.passwordSecret }}
- name: etcd-password
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- with .values.apiKeysSecret }}
- name: api-keys
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- with .values.tenantsSecret }}
- name: tenants
  secret: {secretName: {{ . | quote }}, defaultMode: 0440}
{{- end }}
{{- if .values.models }}
- name: models
  configMap: {name: {{ printf "%s-router-models" (include "isthmus.fullname" .root) }}}
{{- end }}
{{- include "isthmus.tierVolume" .values }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The model's first, where it is made here: small and random, the same in every pod, for it is drawn from a fixed seed. */}}
{{- define "isthmus.initContainers" -}}
{{- $generated := eq .root.Values.model.source "generated" -}}
{{- if or $generated .values.initContainers }}
initContainers:
{{- if $generated }}
  - name: make-model
    image: {{ include "isthmus.image" . }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [isthmus, make-model, {{ .root.Values.model.path | quote }}, --overwrite] # a pod may start twice
    securityContext:
      {{- include "isthmus.containerSecurity" (dict "values" (pick .values "securityContext")) | nindent 6 }}
    resources:
      {{- toYaml (dict "requests" (dict "cpu" "100m" "memory" "512Mi") "limits" (dict "memory" "1Gi")) | nindent 6 }}
    env:
      {{- include "isthmus.env" (dict "values" dict) | nindent 6 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: model, mountPath: {{ .root.Values.model.path | quote }}}
{{- end }}
{{- with .values.initContainers }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of a worker's values; a claim template is the StatefulSet's. */}}
{{- define "isthmus.tierVolume" }}
{{- $file := dig "tiers" "file" dict . }}
{{- if and $file.size (ne (toString $file.volume) "claimTemplate") }}
- name: tier
{{- if eq $file.volume "emptyDir" }}
  emptyDir: {medium: {{ $file.medium | quote }}, sizeLimit: {{ include "isthmus.tierVolumeSize" . }}}
{{- else if eq $file.volume "hostPath" }}
  hostPath: {path: {{ $file.path | quote }}, type: Directory}
{{- else }}
  persistentVolumeClaim: {claimName: {{ $file.claimName | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of the files of a pod's tiers, in bytes. */}}
{{- define "isthmus.tierBytes" -}}
{{- include "isthmus.bytes" (trimSuffix "B" .tiers.file.size) | float64 | mulf (float64 .dpSize) | printf "%.0f" -}}
{{- end -}}

{{/* A tenth more than the files, for directories and the file system: a kubelet evicts a pod above its limit. */}}
{{- define "isthmus.tierVolumeSize" -}}
{{- include "isthmus.tierBytes" . | float64 | mulf 1.1 | include "isthmus.mebibytes" -}}
{{- end -}}

{{/* What a pod's tiers take of its memory, in bytes. */}}
{{- define "isthmus.tierMemory" -}}
{{- $bytes := 0.0 -}}
{{- with .tiers.memory }}{{ $bytes = include "isthmus.bytes" (trimSuffix "B" .) | float64 | mulf (float64 $.dpSize) }}{{ end -}}
{{- if and .tiers.file.size (eq .tiers.file.volume "emptyDir") (eq .tiers.file.medium "Memory") -}}
{{- $bytes = include "isthmus.tierBytes" . | float64 | addf $bytes -}}
{{- end -}}
{{ printf "%.0f" $bytes }}
{{- end -}}

{{- define "isthmus.mebibytes" -}}
{{- divf (float64 .) 1048576.0 | ceil | printf "%.0fMi" -}}
{{- end -}}
