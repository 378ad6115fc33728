{{- define "unisono.selector" -}}
app.kubernetes.io/name: unisono
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "unisono.firstKeySelector" -}}
app.kubernetes.io/name: unisono-first-key
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "unisono.labels" -}}
{{ include "unisono.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "unisono.name" -}}
{{- if contains "unisono" .Release.Name -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-unisono" (.Release.Name | trunc 52 | trimSuffix "-") }}
{{- end -}}
{{- end }}
