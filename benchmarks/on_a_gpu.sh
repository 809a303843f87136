#!/usr/bin/env bash
# All that a GPU has to show, the most valuable first: `bash benchmarks/on_a_gpu.sh [FOLDER]`.
# Each part ends within nine minutes and leaves its page, its numbers and its log in the folder. A part that is done isn't done
# again, so that the command can be given as often as the machine is lent. Parts that fail are named at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-gpu_results}") failed=()
mkdir -p "$out"

part() {  # NAME COMMAND...
    local name=$1
    shift
    [ -e "$out/$name.done" ] && return
    echo "+ $*"
    if timeout 540 "$@" >"$out/$name.log" 2>&1; then touch "$out/$name.done"; else failed+=("$name"); fi
    tail -n 3 "$out/$name.log"
}

page() {  # NAME SCRIPT OPTIONS...
    local name=$1 script=$2
    shift 2
    part "$name" python "benchmarks/$script" "$@" --markdown "$out/$name.md" --output "$out/$name.json"
}

model="--model_name configs/models/smollm2-135m --context_length 1024"
part tests python -m pytest -m gpu -q
page speed gpu.py --shapes 1B 8B --minutes 8.5
page throughput throughput.py --accelerator cuda --dtypes bfloat16 --packed --compile
page optimizer optimizer.py --accelerator cuda --sizes 30M 135M 1B
page context context.py --sharing 1
page speed_more gpu.py --shapes 3B --minutes 8.5
page loss_head fast_paths.py --accelerator cuda
page attention steps.py attention --accelerator cuda
part data python prepare_data.py --input "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
    --train_tokenizer 49152 --context_length 1024 --output "$out/data"
part profile python train.py $model --train_data_dir "$out/data" --output_dir "$out/runs" --run_name profile --max_step 12 \
    --micro_batch_size 16 --profile 5:8
part float8 python train.py $model --train_data_dir "$out/data" --output_dir "$out/runs" --run_name float8 --max_step 30 \
    --micro_batch_size 16 --float8 rowwise
part plain python train.py $model --train_data_dir "$out/data" --output_dir "$out/runs" --run_name plain --max_step 30 \
    --micro_batch_size 16
echo "Pages, numbers and logs: $out"
[ ${#failed[@]} -eq 0 ] || { echo "Failed or not finished: ${failed[*]}"; exit 1; }
