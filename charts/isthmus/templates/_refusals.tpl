{{/* What a schema cannot say: values that do not go together, each with its sentence. */}}
{{- define "isthmus.refusals" -}}
{{- $model := .Values.model -}}
{{- $_ := required "model.path is required: the directory of the checkpoint, as the containers see it" $model.path -}}
{{- if and (eq $model.source "volume") (not $model.volume) -}}
{{- fail "model.source is volume, so model.volume must say which" -}}
{{- end -}}
{{- if and (ne $model.source "volume") $model.volume -}}
{{- fail (printf "model.volume is for model.source volume, which is %s" $model.source) -}}
{{- end -}}
{{- if and (eq $model.source "volume") (not (hasPrefix (printf "%s/" (trimSuffix "/" $model.mountPath)) (printf "%s/" $model.path))) -}}
{{- fail (printf "model.path %s must lie in model.mountPath %s" $model.path $model.mountPath) -}}
{{- end -}}
{{- $drafting := list "speculation" "draft-tokens" "speculate-unsalted" -}}
{{- $ofDecode := concat (list "decode-cache" "itl-target-ms") $drafting -}}
{{- $ofRole := dict "prefill" (list "prefill-cache" "expect-kv-path") "decode" $ofDecode -}}
{{- range $role := list "prefill" "decode" -}}
{{- $worker := index $.Values $role -}}
{{- $gpus := int $worker.gpus -}}
{{- $dpSize := int $worker.dpSize -}}
{{- $other := ternary "decode" "prefill" (eq $role "prefill") -}}
{{- range index $ofRole $other -}}
{{- if not (kindIs "invalid" (index $worker.flags .)) -}}
{{- fail (printf "%s.flags.%s: only %s ranks heed it" $role . $other) -}}
{{- end -}}
{{- end -}}
{{- include "isthmus.nodeRefusals" (dict "role" $role "worker" $worker) -}}
{{- if and (eq $worker.engine "sglang") (lt (mul $gpus (int $worker.nodes)) $dpSize) -}}
{{- fail (printf "%s.gpus is %d: engine sglang needs a GPU for each of its %d DP ranks at least" $role $gpus $dpSize) -}}
{{- end -}}
{{- if and (eq $worker.engine "torch") (gt $gpus 0) (ne (list $gpus $dpSize | toJson) "[1,1]") -}}
{{- fail (printf "%s: on GPUs a pod of engine torch has one rank and one GPU; set gpus and dpSize to 1 and raise replicas" $role) -}}
{{- end -}}
{{- if and (gt $gpus 0) (not $worker.gpuResource) (not $worker.resourceClaims) -}}
{{- fail (printf "%s.gpus is %d, and neither gpuResource nor resourceClaims says by what they are asked for" $role $gpus) -}}
{{- end -}}
{{- if and $worker.hostNetwork $.Values.networkPolicy.enabled -}}
{{- fail (printf "%s.hostNetwork and networkPolicy.enabled exclude each other: a policy does not know pods of the node's network, and would keep them from etcd and from each other" $role) -}}
{{- end -}}
{{- if and (eq $worker.engine "torch") (not (kindIs "invalid" (index $worker.flags "engine-arg"))) -}}
{{- fail (printf "%s.flags.engine-arg is for engine sglang" $role) -}}
{{- end -}}
{{- if eq $worker.engine "sglang" -}}
{{- if has "local" (index $.Values.router.flags "plans" | default list) -}}
{{- fail "router.flags.plans has local, and engine sglang's decode computes no prompts: [remote]" -}}
{{- end -}}
{{- include "isthmus.sglangRefusals" (dict "root" $ "role" $role "arguments" (index $worker.flags "engine-arg" | default list)) -}}
{{- range concat (list "itl-target-ms" "shorter-first" "protected-cache-share" "write-lease-s" "fence-margin-s" "kv-digest-share" "step-limit-s" "draft-model" "kv-dtype" "graph-mib" "weights" "pull" "hand-over-s" "move-running") $drafting -}}
{{- if not (kindIs "invalid" (index $worker.flags .)) -}}
{{- fail (printf "%s.flags.%s is for engine torch: SGLang has its own way with that" $role .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "isthmus.pageRefusals" . -}}
{{- range $role := list "prefill" "decode" -}}
{{- include "isthmus.tierRefusals" (dict "role" $role "worker" (index $.Values $role)) -}}
{{- end -}}
{{- if ne (eq .Values.prefill.engine "sglang") (eq .Values.decode.engine "sglang") -}}
{{- fail "prefill.engine and decode.engine must be the same: KV of one engine is not the other's" -}}
{{- end -}}
{{- if and .Values.tls.mutual (not .Values.tls.secretName) -}}
{{- fail "tls.mutual needs tls.secretName" -}}
{{- end -}}
{{- if and (or .Values.tls.peerName .Values.tls.clientCaConfigMap) (not .Values.tls.mutual) -}}
{{- fail "tls.peerName and tls.clientCaConfigMap need tls.mutual, which asks clients for a certificate" -}}
{{- end -}}
{{- if not .Values.etcd.external.endpoints }}{{ include "isthmus.etcdRefusals" . }}{{ end -}}
{{- if and .Values.etcd.external.user (not .Values.etcd.external.endpoints) -}}
{{- fail "etcd.external.user is for etcd.external.endpoints: the chart's own etcd has no users" -}}
{{- end -}}
{{- if ne (empty .Values.etcd.external.user) (empty .Values.etcd.external.passwordSecret) -}}
{{- fail "etcd.external.user and etcd.external.passwordSecret go together" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- fail "ingress.enabled needs ingress.host" -}}
{{- end -}}
{{- if and .Values.ingress.enabled .Values.tls.mutual -}}
{{- fail "ingress.enabled and tls.mutual exclude each other: the Ingress has no certificate to show the routers" -}}
{{- end -}}
{{- if and .Values.gateway.enabled (not .Values.gateway.parentRefs) -}}
{{- fail "gateway.enabled needs gateway.parentRefs: the Gateway to attach to" -}}
{{- end -}}
{{- if and .Values.gateway.enabled .Values.tls.secretName (not .Values.gateway.caConfigMap) -}}
{{- fail "gateway.enabled with tls.secretName needs gateway.caConfigMap: the Gateway must trust the routers' authority" -}}
{{- end -}}
{{- if and .Values.gateway.enabled .Values.tls.mutual -}}
{{- fail "gateway.enabled and tls.mutual exclude each other: a Gateway shows the routers no certificate" -}}
{{- end -}}
{{- $scaling := .Values.router.autoscaling -}}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "router.autoscaling.minReplicas is above maxReplicas: %d and %d" (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- if $scaling.enabled }}{{ include "isthmus.scalingRefusals" .Values.router }}{{ end -}}
{{- if .Values.autoscaling.enabled }}{{ include "isthmus.plannedRefusals" . }}{{ end -}}
{{- end -}}

{{/* Of workers whose number is planned. */}}
{{- define "isthmus.plannedRefusals" -}}
{{- $flags := .Values.router.flags -}}
{{- if not (or (index $flags "plan-ttft-s") (index $flags "plan-itl-ms")) -}}
{{- fail "autoscaling.enabled needs router.flags.plan-ttft-s or plan-itl-ms: routers without a goal plan nothing" -}}
{{- end -}}
{{- if and (not (kindIs "invalid" (index $flags "plan-window-s"))) (not (index $flags "plan-window-s")) -}}
{{- fail "autoscaling.enabled: router.flags.plan-window-s is 0, and routers that remember no requests plan nothing" -}}
{{- end -}}
{{- $prometheus := .Values.autoscaling.prometheus -}}
{{- $_ := required "autoscaling.enabled needs autoscaling.prometheus.address: KEDA reads there what is planned" $prometheus.address -}}
{{- if and $prometheus.authModes (not $prometheus.triggerAuthentication) -}}
{{- fail "autoscaling.prometheus.authModes needs autoscaling.prometheus.triggerAuthentication, which has the secrets" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $bounds := index $.Values.autoscaling $role -}}
{{- $worker := index $.Values $role -}}
{{- if gt (int $bounds.minReplicas) (int $bounds.maxReplicas) -}}
{{- fail (printf "autoscaling.%s.minReplicas is above maxReplicas: %d and %d" $role (int $bounds.minReplicas) (int $bounds.maxReplicas)) -}}
{{- end -}}
{{- if gt (int $worker.nodes) 1 -}}
{{- fail (printf "autoscaling.enabled and %s.nodes %d exclude each other: the number of workers of several nodes is not planned" $role (int $worker.nodes)) -}}
{{- end -}}
{{- $leaving := include "isthmus.leavingSeconds" (dict "root" $ "values" $worker) | int -}}
{{- if gt $leaving 1800 -}}
{{- fail (printf "autoscaling.enabled: a %s worker may take %d s to leave (grace-s, hand-over-s and 25), and Kubernetes lets one go after the other for 1800 s at most. Lower either" $role $leaving) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of a worker with several nodes. {role, worker} */}}
{{- define "isthmus.nodeRefusals" -}}
{{- $role := .role -}}
{{- range index .worker.flags "engine-arg" | default list -}}
{{- $flag := regexReplaceAll "=.*" . "" -}}
{{- if has $flag (list "--nnodes" "--node-rank" "--dist-init-addr") -}}
{{- fail (printf "%s.flags.engine-arg %s: %s.nodes says it" $role . $role) -}}
{{- end -}}
{{- end -}}
{{- if gt (int .worker.nodes) 1 -}}
{{- if ne .worker.engine "sglang" -}}
{{- fail (printf "%s.nodes is %d: only a worker of engine sglang can have several" .role (int .worker.nodes)) -}}
{{- end -}}
{{- if ne .worker.updateStrategy.type "RollingUpdate" -}}
{{- fail (printf "%s.updateStrategy.type is %s: workers of several nodes know RollingUpdate alone" .role .worker.updateStrategy.type) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Where ranks refuse tiers, and what says nothing without another value. {role, worker} */}}
{{- define "isthmus.tierRefusals" -}}
{{- $worker := .worker -}}
{{- $file := $worker.tiers.file -}}
{{- $own := dict "path" "hostPath" "medium" "emptyDir" "storageClassName" "claimTemplate" "claimName" "claim" -}}
{{- range $name, $volume := $own -}}
{{- if and (index $file $name) (or (not $file.size) (ne $file.volume $volume)) -}}
{{- fail (printf "%s.tiers.file.%s is for a file with a size, and volume %s" $.role $name $volume) -}}
{{- end -}}
{{- end -}}
{{- if and $file.size (eq $file.volume "hostPath") (not $file.path) -}}
{{- fail (printf "%s.tiers.file.volume is hostPath, so %s.tiers.file.path must say which" .role .role) -}}
{{- end -}}
{{- if and $file.size (eq $file.volume "claim") (not $file.claimName) -}}
{{- fail (printf "%s.tiers.file.volume is claim, so %s.tiers.file.claimName must say which" .role .role) -}}
{{- end -}}
{{- if and (not (kindIs "invalid" (index $worker.flags "kv-tier-write-mbps"))) (not $file.size) -}}
{{- fail (printf "%s.flags.kv-tier-write-mbps limits %s.tiers.file, which has no size" .role .role) -}}
{{- end -}}
{{- if and (has (index $worker.flags "kv-tier-shared" | default "off" | toString) (list "on" "true")) (not $file.size) -}}
{{- fail (printf "%s.flags.kv-tier-shared reads %s.tiers.file, which has no size" .role .role) -}}
{{- end -}}
{{- if or $worker.tiers.memory $file.size -}}
{{- if eq $worker.engine "sglang" -}}
{{- fail (printf "%s.tiers is for engine torch: SGLang has its own way with that" .role) -}}
{{- end -}}
{{- $cache := printf "%s-cache" .role -}}
{{- if has (index $worker.flags $cache | default "on" | toString) (list "off" "false") -}}
{{- fail (printf "%s.tiers keeps what %s.flags.%s has, which is off" .role .role $cache) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What the services refuse too; the file is written from their code. {root, role, arguments} */}}
{{- define "isthmus.sglangRefusals" -}}
{{- $refused := .root.Files.Get "sglang-flags.json" | fromJson -}}
{{- $role := .role -}}
{{- range $argument := .arguments -}}
{{- $flag := regexReplaceAll "=.*" $argument "" -}}
{{- with index $refused.flags $flag -}}
{{- fail (printf "%s.flags.engine-arg %s: %s" $role $argument .) -}}
{{- end -}}
{{- range $prefix, $reason := $refused.families -}}
{{- if hasPrefix $prefix $flag }}{{ fail (printf "%s.flags.engine-arg %s: %s" $role $argument $reason) }}{{ end -}}
{{- end -}}
{{- if eq $role "decode" -}}
{{- range $prefix, $reason := $refused.onDecode -}}
{{- if hasPrefix $prefix $flag }}{{ fail (printf "decode.flags.engine-arg %s: %s" $argument $reason) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- with index $refused.onlyAtOne $flag -}}
{{- if ne $argument (printf "%s=1" $flag) }}{{ fail (printf "%s.flags.engine-arg %s: %s" $role $argument .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
An autoscaler adds pods once they use a tenth more than it aims at (Kubernetes' tolerance), and a router's Python runs
on one core. {the router's values}
*/}}
{{- define "isthmus.scalingRefusals" -}}
{{- $cpu := index (.resources.requests | default dict) "cpu" | default "" | toString -}}
{{- if not $cpu -}}
{{- fail "router.autoscaling.enabled needs router.resources.requests.cpu: what it aims at is a share of that" -}}
{{- end -}}
{{- $cores := trimSuffix "m" $cpu | float64 -}}
{{- if hasSuffix "m" $cpu }}{{ $cores = divf $cores 1000 }}{{ end -}}
{{- $target := int .autoscaling.targetCPUUtilizationPercentage -}}
{{- $needed := divf (mulf $cores $target 1.1) 100 -}}
{{- if ge $needed 1.0 -}}
{{- fail (printf "router.resources.requests.cpu is %s and router.autoscaling.targetCPUUtilizationPercentage %d: each router would have to use %.2f cores before another is added, and it computes on one. Lower either" $cpu $target $needed) -}}
{{- end -}}
{{- end -}}

{{/* Prefill writes pages into decode's pool, and blocks of the index are made of whole pages. */}}
{{- define "isthmus.pageRefusals" -}}
{{- $block := index .Values.flags "index-block" | default 64 | int -}}
{{- $sizes := list -}}
{{- $dtypes := list -}}
{{- range $role := list "prefill" "decode" -}}
{{- $flags := (index $.Values $role).flags -}}
{{- $size := 64 -}}
{{- if not (kindIs "invalid" (index $flags "page-size")) }}{{ $size = index $flags "page-size" | int }}{{ end -}}
{{- if ne (mod $block $size) 0 -}}
{{- fail (printf "flags.index-block is %d, which %s.flags.page-size %d does not divide" $block $role $size) -}}
{{- end -}}
{{- $sizes = append $sizes $size -}}
{{- with index $flags "dtype" }}{{ $dtypes = append $dtypes . }}{{ end -}}
{{- end -}}
{{- if ne (first $sizes) (last $sizes) -}}
{{- fail (printf "flags.page-size is %d for prefill and %d for decode: KV of one is not the other's" (first $sizes) (last $sizes)) -}}
{{- end -}}
{{- if gt (uniq $dtypes | len) 1 -}}
{{- fail (printf "flags.dtype is %s for prefill and %s for decode: KV of one is not the other's" (first $dtypes) (last $dtypes)) -}}
{{- end -}}
{{- end -}}
