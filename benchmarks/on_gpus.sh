#!/usr/bin/env bash
# What several GPUs of one machine have to show: `bash benchmarks/on_gpus.sh DEVICES [FOLDER [MINUTES]]`, with an even number of
# devices. Every strategy trains, is killed and goes on, on half of the devices as well, and its losses are those of one device.
# --rehearse first: the same with processes on CPUs and at toy size, so that only NCCL is new. Options and files as of on_a_gpu.sh.
set -uo pipefail
cd "$(dirname "$0")/.."
rehearses= && [ "${1:-}" = --rehearse ] && rehearses=1 && shift
devices=${1:?the number of devices} half=$((${1} / 2))
out=$(realpath -m "${2:-gpus_results}") ends=$((SECONDS + $(python -c "print(round(60 * ${3:-30}))")))
mkdir -p "$out"
. benchmarks/parts.sh

library=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
model="--model_name configs/models/llama3.2-1b --accelerator cuda" context=4096 rows=32 precision=bf16-mixed
if [ "$rehearses" ]; then
    mkdir -p "$out/model"  # of four heads, which context parallelism divides
    sed -E 's/("num_(attention|key_value)_heads": )3/\14/' configs/demo_llama/config.json >"$out/model/config.json"
    model="--model_name $out/model --accelerator cpu --oversubscribe true" context=64 rows=8 precision=32-true
    export OMP_NUM_THREADS=1
fi
flags="$model --train_data_dir $out/data --global_batch_size $rows --precision $precision --max_step 6 --lr 1e-4 --eval_iters 1
    --log_step_interval 1 --save_step_interval 3 --fast_paths strict --output_dir $out/runs"

train() {  # NAME DEVICES OPTIONS...
    local name=$1 devices=$2
    shift 2
    part "$name" python train.py $flags --run_name "$name" --devices "$devices" "$@"
    same "$name"
}

same() {  # NAME: its losses are those of one device, to rounding
    part "$1-same" python - "$out/runs/one/metrics.jsonl" "$out/runs/$1/metrics.jsonl" <<'PYTHON'
import json, sys

losses = []
for file in sys.argv[1:]:
    lines = [json.loads(line) for line in open(file)]
    losses.append({line["step"]: line["loss"] for line in lines if "loss" in line})
apart = max(abs(losses[0][step] - losses[1][step]) for step in losses[0])
print(f"{len(losses[0])} losses, at most {apart:.2e} apart: {list(losses[1].values())}")
sys.exit(losses[0].keys() != losses[1].keys() or not apart < 2e-2)
PYTHON
}

two_nodes() {  # NAME OPTIONS...: two commands, each with half of the devices, as on two machines
    local name=$1 port
    shift
    port=$(python -c 'import socket; one = socket.create_server(("127.0.0.1", 0)); print(one.getsockname()[1])')
    part "$name" bash -c '
        half=$1 port=$2; shift 2
        export MASTER_ADDR=127.0.0.1 MASTER_PORT=$port
        NODE_RANK=1 CUDA_VISIBLE_DEVICES=$(seq -s, "$half" $((2 * half - 1))) python train.py "$@" &
        NODE_RANK=0 CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((half - 1))) python train.py "$@" && wait $!
    ' - "$half" "$port" $flags --run_name "$name" --devices "$half" --num_nodes 2 "$@"
    same "$name"
}

part data python prepare_data.py --input "$library"/{asyncio,email,json,unittest} --pattern '*.py' --train_tokenizer 8192 \
    --context_length $context --output "$out/data"
part one python train.py $flags --run_name one --devices 1
train fsdp "$devices" --strategy fsdp
train fsdp2 "$devices" --strategy fsdp2
train ddp "$devices" --strategy ddp
train sharded "$devices" --strategy fsdp2 --state_dict_type sharded
two_nodes hybrid_fsdp --strategy fsdp --sharding_strategy HYBRID_SHARD
two_nodes hybrid_fsdp2 --strategy fsdp2 --sharding_strategy HYBRID_SHARD
train context "$devices" --strategy fsdp2 --context_parallel 2
train cpu_offload "$devices" --strategy fsdp2 --cpu_offload true
train offload "$devices" --strategy fsdp2 --activation_checkpointing offload
# Killed at random and resumed, bit for bit.
for strategy in fsdp fsdp2; do
    part "drill_$strategy" python -m fabric_llm.verify --drill --steps 6 --seed 1 --output "$out/drill_$strategy.json" -- \
        ${flags/--max_step 6/} --devices "$devices" --strategy $strategy --state_dict_type sharded
done
# From all devices to half of them, in the middle of a run.
for strategy in fsdp fsdp2; do
    part "from_all_$strategy" python train.py $flags --run_name "fewer_$strategy" --devices "$devices" --strategy $strategy \
        --state_dict_type sharded
    part "fewer_$strategy" python train.py $flags --run_name "fewer_$strategy" --devices "$half" --strategy $strategy \
        --resume true --checkpoint "$out/runs/fewer_$strategy/step-00000003" --state_dict_type sharded
    same "fewer_$strategy"
    part "export_$strategy" python export_hf.py "$out/runs/fewer_$strategy" --output "$out/hf_$strategy"
done
finish
