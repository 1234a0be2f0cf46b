#!/bin/bash
# slurm.sh - a Slurm batch job that trains GPT-2 XL on two nodes with four GPUs each. It saves before its time is over, and queues
# itself again.
#
#   sbatch dev/launch/slurm.sh [OPTION OF THE PROGRAM...]
#
# Adapt the lines below to your cluster; options of sbatch override them. Submit it from the repository's root, after
# make PRECISION=bf16 train_gpt2_fsdp and make DEVICE=cpu build/verify. Each task is a rank. Slurm must support PMIx
# (srun --mpi=list shows it). If it does not, replace srun below with dev/launch/mpirun.sh or plain mpirun, which asks Slurm for the
# nodes.
#SBATCH --job-name=gpt2-xl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=gpt2-xl-%j.log
set -eu
out=${OUT:-runs/gpt2-xl}
program=${PROGRAM:-./train_gpt2_fsdp}
[ -x "$program" ] || { echo "error: there is no $program here ($PWD); make train_gpt2_fsdp, and sbatch from that folder" >&2; exit 1; }

# The ranks of a node share one replica of the model: all-gathers stay within the node, and only gradients travel between nodes.
# Each node needs memory for a whole replica; --sharding full spreads one replica over all nodes.
group=${SLURM_NTASKS_PER_NODE:?this is a script for sbatch: sbatch dev/launch/slurm.sh}
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
# If one rank dies, Slurm kills all (--kill-on-bad-exit), and keep_running restarts them from their last checkpoint. A job that is
# queued again also continues from the last checkpoint.
dev/launch/keep_running srun --mpi=pmix --kill-on-bad-exit=1 "$program" --model gpt2-xl --tokenizer data/gpt2 \
    --data 'data/fineweb-edu/*train*.bin' --val-data 'data/fineweb-edu/*val*.bin' --seq-len 1024 --batch-size 1 \
    --total-batch-size 524288 --recompute block --sharding hybrid --shard-group "$group" --lr 2e-4 --warmup-steps 700 --steps 20000 \
    --out "$out" --save-every 250 --checkpoint sharded "$@" &
# Five minutes before its time is over (--signal above), or after scancel --batch --signal=USR1 JOB, the run saves and ends with
# status 200. Only then does the job queue itself again, because requeueing kills everything that still runs.
told=
trap 'told=1; kill -USR1 $!' USR1
while wait $!; status=$?; [ $status -gt 128 ] && kill -0 $! 2>/dev/null; do :; done # a signal ends wait early
if [ -n "$told" ] && [ $status = 200 ]; then
    echo "USR1: saved, and queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
