#!/usr/bin/env bash
# Slurm: one process per host, which uses all of its GPUs. JAX asks Slurm which processes take part.
#
#     sbatch examples/launch/slurm.sh [options of train.py]
#
# SIGTERM comes a minute before the time is over or another job takes the hosts. The run then saves and ends, goes back
# into the queue, and continues later. A step that hangs ends its process with status 75, and all others with it.
#SBATCH --job-name=zerojax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=zerojax-%j.log

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7  # otherwise JAX gives each process of Slurm one GPU
# --kill-on-bad-exit: a process that fails ends the others, which would wait for it forever.
srun --kill-on-bad-exit=1 python examples/launch/train.py --out "runs/${SLURM_JOB_ID:-launch}" "$@"
status=$?
if [ "$status" -ne 0 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
