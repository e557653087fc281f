#!/bin/bash
# sbatch slurm.sh: trains, and puts itself back into the queue where that can help.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8 # a process for each GPU, as jax divides a node under SLURM
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120 # to the processes, 120 s before the time is over: they save, and end with 138

# After the first process that fails the others get SIGTERM; the code is the highest of all.
srun --kill-on-bad-exit=1 python train.py
code=$?

if ((code == 75 || code == 76 || (code > 128 && code != 130))) && ((${SLURM_RESTART_COUNT:-0} < 50)); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
