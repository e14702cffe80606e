#!/bin/bash
# Runs a trainer on several machines of a Slurm cluster, and resumes it after a preemption or a failure:
#   sbatch --nodes 2 --gpus-per-node 8 accelerate_configs/slurm.sh train_text_to_image.py --output_dir /shared/sd ...
# Put --output_dir on a disk that all machines share, or use --checkpoints_to. --shards_dir, --cache_dir and data sets may
# be on each machine's own disk.
#SBATCH --job-name=train
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@180

# After SIGTERM the trainer finishes its step, saves, and copies to --checkpoints_to. torch would kill it after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=170
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export first
# Each machine runs the command in ''. A signal, or the end of one machine's command, ends all.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file accelerate_configs/multi_node.yaml \
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * ${SLURM_GPUS_ON_NODE:-1}))" \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$first" --main_process_port "$((20000 + SLURM_JOB_ID % 10000))" \
    "$@" --resume_from_checkpoint latest' on-each-machine "$@"
