#!/bin/bash
# torchrun with the exit code of the run: bash configs/torchrun_code.sh checkpoints/RUN FLAGS OF torchrun train.py FLAGS OF train.py
# torchrun itself ends with 1 whatever happened, so that a scheduler can't tell a lost rank from a mistake (docs/faults.md).
run=$1
shift
before=$(cat "$run/STATUS.json" 2> /dev/null)
# Seconds from a SIGTERM until torchrun kills its ranks, which save meanwhile. Versions of torch that don't know it wait 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-280}
trap 'stopped=75; kill -TERM $training' TERM

# In the background, since bash runs traps between commands only.
torchrun "$@" &
training=$!
while kill -0 $training 2> /dev/null; do wait $training; done  # a signal ends `wait`, but not the training
wait $training
code=$?
[ $code = 0 ] && exit 0

for _ in {1..60}; do  # the machine whose fault it was may still be writing, and NFS shows old content for a minute
    after=$(cat "$run/STATUS.json" 2> /dev/null)
    [ "$after" != "$before" ] && ! grep -q '"code": null' <<< "$after" && break
    [ -z "$after" ] && break  # the run has no directory: a mistake in the flags
    sleep 1
done
[ "$after" = "$before" ] && exit ${stopped:-$code}  # it was found, or it was told to stop, before the run began
exit "$(python -c '
import json, sys
status = json.loads(sys.argv[1])
code = 71 if status["code"] is None else status["code"]  # killed before anybody could write why
print(73 if code == 74 and not status["retryable"] else code)  # a disk that is full
' "$after")"
