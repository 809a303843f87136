# Sourced by on_a_gpu.sh and on_gpus.sh: parts of a job that leave their log in $out. One that is done isn't done again, none begins
# after $ends, and those that fail are named at the end.
failed=()

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

finish() {
    echo "Pages, numbers and logs: $out"
    [ ${#failed[@]} -eq 0 ] || { printf 'Failed or not finished: %s\n' "${failed[*]}"; exit 1; }
}
