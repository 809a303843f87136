#!/usr/bin/env bash
# All that a GPU has to show, the most valuable first: `bash benchmarks/on_a_gpu.sh [--rehearse] [FOLDER [MINUTES]]`.
# No part begins after the minutes, nine unless they are given, and one that isn't done then is stopped. Each leaves its page, its
# numbers and its log in the folder. A part that is done isn't done again, so that the command can be given as often as the machine
# is lent. Parts that fail are named at the end. --rehearse: all parts at toy size on a CPU, so that no minute of a GPU is lost to a
# mistake in them.
set -uo pipefail
cd "$(dirname "$0")/.."
rehearses= && [ "${1:-}" = --rehearse ] && rehearses=1 && shift
out=$(realpath -m "${1:-gpu_results}") ends=$((SECONDS + $(python -c "print(round(60 * ${2:-9}))")))
mkdir -p "$out"

. benchmarks/parts.sh

page() {  # NAME SCRIPT OPTIONS...
    local name=$1 script=$2
    shift 2
    part "$name" python "benchmarks/$script" "$@" --markdown "$out/$name.md" --output "$out/$name.json"
}

train() {  # NAME OPTIONS...
    local name=$1
    shift
    part "$name" python train.py $model --train_data_dir "$out/data" --lr 2e-5 --output_dir "$out/runs" --run_name "$name" \
        --fast_paths strict --eval_iters 2 "$@"
}

library=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
on="--accelerator cuda" model="--model_name configs/models/llama3.2-1b --micro_batch_size 4"
context=4096 sizes="135M 1B" shapes="1B 8B" more="1B 3B 8B" tests="-m gpu -v -n 16 --dist worksteal -p no:benchmark"
# each process that compiles would start a compiler on every core
export TORCHINDUCTOR_COMPILE_THREADS=2
if [ "$rehearses" ]; then
    on="--accelerator cpu --smoke" model="--model_name configs/demo_llama --micro_batch_size 1 --accelerator cpu --devices 1"
    context=64 sizes=toy shapes=toy more=toy tests="-m gpu --collect-only -q"
fi
on_optimizer=${on% --smoke}
part families python -m pytest $tests tests/test_gpu_families.py
part kernels python -m pytest $tests tests/test_gpu.py -k "not killed and not verified"
part kills_16 python -m pytest $tests tests/test_gpu.py -k "killed and 16-mixed and not bf16-mixed"
part kills_bf16 python -m pytest $tests tests/test_gpu.py -k "killed and bf16 or verified"
part kills_32 python -m pytest $tests tests/test_gpu.py -k "killed and 32-true"
page speed gpu.py $on --shapes $shapes --minutes 2.5 --trace "$out/trace"
page throughput throughput.py $on --dtypes bfloat16 --packed --compile --rounds 5
page optimizer optimizer.py $on_optimizer --sizes $sizes
part data python prepare_data.py --input "$library"/{asyncio,email,json,unittest} --pattern '*.py' --train_tokenizer 8192 \
    --context_length $context --output "$out/data"
page speed_more gpu.py $on --shapes $more --minutes 8.5
page context steps.py context $on
page loss_head steps.py loss $on --dtypes bfloat16
page attention steps.py attention $on --dtypes bfloat16
train float8 --max_step 30 --float8 rowwise
finish
