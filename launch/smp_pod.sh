#!/usr/bin/env bash
# The SMP of a pod, as the first process of a sidecar: smp_pod.sh JOB [ARENA]
#
# ARENA (default: /dev/shm) is the volume in memory that the pod's containers share; the node goes by the pod's host name.
# Kubernetes tells a sidecar to end once the containers that train have ended. Then the newest committed snapshot goes to
# storage, where the job names some, within FTCKPT_SAVE_SECS (90); the memory goes with the pod. Should trainers have
# started an SMP meanwhile, as they do when this one is killed, this one takes over when that ends with their container.

set -euo pipefail
NAME=smp_pod.sh
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/job.sh
source "$HERE/job.sh"
# shellcheck source=launch/smp_process.sh
source "$HERE/smp_process.sh"

case ${1:-} in '' | -h | --help) usage "$0" && exit ;; esac
PYTHON=${FTCKPT_PYTHON:-python3}
SAVE_SECS=${FTCKPT_SAVE_SECS:-90}
JOB=$1
ARENA=${2:-/dev/shm}
NODE=${FTCKPT_NODE:-$HOSTNAME}
checked_name JOB "$JOB"
whole FTCKPT_SAVE_SECS "$SAVE_SECS" 1

run_smp --stand-by
say "told to stop"
# shellcheck disable=SC2034 # read by save_here; a job that names no storage says so then
PERSISTS=1
save_here || true
end_smp
