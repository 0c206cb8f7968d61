{{- define "lorafleet.labels" -}}
{{ include "lorafleet.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "lorafleet.selectorLabels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "lorafleet.name" -}}
{{ printf "%s-%s" .root.Release.Name .component | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "lorafleet.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}
{{- else -}}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}
{{- end }}

{{- define "lorafleet.redisUrl" -}}
{{- .Values.redis.url | default (printf "redis://%s:6379/0" (include "lorafleet.name" (dict "root" . "component" "redis"))) -}}
{{- end }}

{{- define "lorafleet.blobsClaim" -}}
{{- .Values.blobs.existingClaim | default (include "lorafleet.name" (dict "root" . "component" "blobs")) -}}
{{- end }}

{{- define "lorafleet.operatorSecret" -}}
{{- .Values.auth.existingSecret | default (include "lorafleet.name" (dict "root" . "component" "operator")) -}}
{{- end }}

{{- define "lorafleet.modelDir" -}}
/model/{{ .Values.model.path }}
{{- end }}

{{/* The pod fields that every workload of ours shares. */}}
{{- define "lorafleet.pod" -}}
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "lorafleet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{/* A Ray pod: model and adapters mounted, /tmp writable. Wants root, name and resources. */}}
{{- define "lorafleet.rayPod" -}}
{{ include "lorafleet.pod" .root }}
containers:
  - name: {{ .name }}
    image: {{ include "lorafleet.image" .root }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    env: {{- include "lorafleet.env" .root | nindent 6 }}
    resources: {{- toYaml .resources | nindent 6 }}
    securityContext: {{- include "lorafleet.containerSecurity" .root | nindent 6 }}
    volumeMounts:
      - { name: model, mountPath: /model, readOnly: true }
      - { name: blobs, mountPath: /blobs }
      - { name: tmp, mountPath: /tmp }
volumes:
  - name: model
    persistentVolumeClaim: { claimName: {{ .root.Values.model.existingClaim }}, readOnly: true }
  - name: blobs
    persistentVolumeClaim: { claimName: {{ include "lorafleet.blobsClaim" .root }} }
  - name: tmp
    emptyDir: {}
{{- end }}

{{- define "lorafleet.env" -}}
- { name: LORAFLEET_HOME, value: /tmp/lorafleet }
- { name: RAY_USAGE_STATS_ENABLED, value: "0" }
{{- end }}
