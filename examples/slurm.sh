#!/bin/bash
# Trains on several machines under Slurm: sbatch examples/slurm.sh RECIPE RUN_FOLDER
# The run folder, and the cache of corpora (TXL_CACHE), lie on a disk that all machines share.
#SBATCH --job-name=transformer-xl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# Before the time is up, or the machines are wanted back: two minutes to save.
#SBATCH --signal=TERM@120
# A job that was preempted starts again, and the run goes on where it was.
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

recipe=$1
out=$2
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# Each time torchrun starts the workers anew, they meet in a store of their own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Once, before the machines stand waiting for one another.
txl prepare "$recipe"

srun torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node gpu \
    --max-restarts 3 \
    --shutdown-timeout 110 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head:29500" \
    -m transformer_xl train "$recipe" --out "$out"
