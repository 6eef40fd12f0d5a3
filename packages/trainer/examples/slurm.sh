#!/usr/bin/env bash
# tidemill on two nodes with eight GPUs each: training on four GPUs of each node, engines on the others.
#   sbatch slurm.sh mine.toml
#SBATCH --job-name=tidemill
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail

# Environment, model, data and run folder are on a file system that all nodes share.
source .venv/bin/activate

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The address of its name or, if /etc/hosts has 127.0.1.1 for it, of its first interface.
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" sh -c 'hostname --ip-address; hostname --all-ip-addresses' |
    tr ' ' '\n' | awk '/^[0-9.]+$/ && !/^127[.]/ && !found++')
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(openssl rand -hex 32) # other users of the cluster cannot connect to Ray without it
export RAY_AUTH_MODE RAY_AUTH_TOKEN

# Starts Ray on all nodes, runs the command on the first one, and stops Ray afterwards, also after an error.
srun ray symmetric-run --address "$address:6379" --min-nodes "$SLURM_NNODES" --num-gpus 8 -- \
    tidemill train "$1" \
    trainer.ray_address=auto trainer.nnodes="$SLURM_NNODES" actor.num_workers=8 rollout.num_engines=8
