#!/usr/bin/env bash
# All that a GPU has to show, the most valuable first: `bash benchmarks/on_a_gpu.sh [FOLDER [MINUTES]]`.
# No part begins after the minutes, nine unless they are given, and one that isn't done then is stopped. Each leaves its page, its
# numbers and its log in the folder. A part that is done isn't done again, so that the command can be given as often as the machine
# is lent. Parts that fail are named at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-gpu_results}") ends=$((SECONDS + $(python -c "print(round(60 * ${2:-9}))"))) failed=()
mkdir -p "$out"

part() {  # NAME COMMAND...
    local name=$1 began=$SECONDS
    shift
    [ -e "$out/$name.done" ] && return
    [ $((ends - SECONDS)) -lt 15 ] && { failed+=("$name (not begun)"); return; }
    echo "+ $*"
    if timeout -s INT -k 10 $((ends - SECONDS)) "$@" >"$out/$name.log" 2>&1; then touch "$out/$name.done"; else failed+=("$name"); fi
    tail -n 3 "$out/$name.log"
    echo "  $((SECONDS - began)) s"
}

page() {  # NAME SCRIPT OPTIONS...
    local name=$1 script=$2
    shift 2
    part "$name" python "benchmarks/$script" "$@" --markdown "$out/$name.md" --output "$out/$name.json"
}

train() {  # NAME OPTIONS...
    local name=$1
    shift
    part "$name" python train.py --model_name configs/models/llama3.2-1b --train_data_dir "$out/data" --lr 2e-5 \
        --output_dir "$out/runs" --run_name "$name" --micro_batch_size 4 --eval_iters 2 "$@"
}

library=$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
part tests python -m pytest -m gpu -v -n 16 --dist worksteal -p no:benchmark tests/test_gpu.py
page speed gpu.py --shapes 1B 8B --minutes 2
page throughput throughput.py --accelerator cuda --dtypes bfloat16 --packed --compile --rounds 5
page optimizer optimizer.py --accelerator cuda --sizes 135M 1B
part data python prepare_data.py --input "$library"/{asyncio,email,json,unittest} --pattern '*.py' --train_tokenizer 16384 \
    --context_length 4096 --output "$out/data"
train profile --max_step 12 --profile 5:8
page speed_more gpu.py --minutes 8.5
page context context.py --sharing 1
page loss_head fast_paths.py --accelerator cuda
page attention steps.py attention --accelerator cuda --dtypes bfloat16
train float8 --max_step 30 --float8 rowwise
echo "Pages, numbers and logs: $out"
[ ${#failed[@]} -eq 0 ] || { printf 'Failed or not finished: %s\n' "${failed[*]}"; exit 1; }
