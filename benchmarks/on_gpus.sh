#!/usr/bin/env bash
# Everything that a machine with GPUs can show, part by part; docs/performance.md says what for.
#
#   OUT=folder benchmarks/on_gpus.sh [PART[:SECONDS] ...]      from the repository's root
#
# One GPU: head sync route_scheduler stop_scheduler fp8_sync fp8_rollout fp8_first_step
#          proof_ipc train rollout routes step weight_sync_ipc mismatch route_gate route_noise demo
# Two:     proof_broadcast weight_sync_broadcast overlap demo_apart demo_tp2 verify verify_bf16
#          asynchronous
# Without parts it runs all that the visible GPUs can hold. Each writes OUT/PART.log and, if it is a
# benchmark, OUT/PART.json; a part that fails or runs out of time does not stop the others. Results
# that a page of docs/ cites are kept as benchmarks/results/PART-CARD-DATE.
set -uo pipefail
OUT=${OUT:?a folder for what the parts write} PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-ERROR}
models=${MODELS:-$HOME/.cache/rltrain}

bench() { "$PYTHON" -m "benchmarks.$1" --out "$OUT/$part.json" "${@:2}"; }

demo() { # the recipe's first 20 steps: 80 % of the held-out problems or more is what the demo shows
  "$PYTHON" -m rltrain.main +recipe=grpo_moe_r3 trainer.steps=20 rollout.enforce_eager=true \
    tracking.backends=[] "model.cache_dir=$models" "trainer.output_dir=/tmp/$part-$$" "$@"
  local status=$?
  mkdir -p "$OUT/$part" && cp /tmp/$part-$$/*.{jsonl,html,csv,yaml} "$OUT/$part/" 2>/dev/null
  return $status
}

run() {
  case $part in
    head) "$PYTHON" tests/gpu/test_deferred_head.py ;;
    sync) "$PYTHON" tests/gpu/test_replay_without_sync.py ;;
    route_scheduler) "$PYTHON" tests/integration/test_route_scheduler.py "/tmp/$part-$$" ;;
    stop_scheduler) "$PYTHON" tests/integration/test_stop_scheduler.py "/tmp/$part-$$" ;;
    fp8_sync) "$PYTHON" tests/gpu/test_fp8_rollout.py "/tmp/$part-$$" fp8 ;;
    fp8_rollout) "$PYTHON" tests/gpu/test_fp8_rollout.py "/tmp/$part-$$" fp8 bf16 ;; # that and bf16
    fp8_first_step) "$PYTHON" tests/gpu/test_fp8_rollout.py "/tmp/$part-$$" fp8-native fp8-trainer ;;
    proof_ipc) "$PYTHON" tests/gpu/test_weight_sync.py "/tmp/$part-$$" ipc ;;
    proof_broadcast) "$PYTHON" tests/gpu/test_weight_sync.py "/tmp/$part-$$" broadcast ;;
    train) bench train --profile "$OUT/profiles" ;;
    rollout) bench rollout ;;
    routes) bench routes ;;
    step) bench step ;;
    weight_sync_ipc) bench weight_sync --transport ipc ;;
    weight_sync_broadcast) bench weight_sync --transport broadcast ;;
    overlap) bench overlap ;;
    mismatch) bench mismatch --train-seconds 200 ;;
    route_gate) bench route_gate ;; # what the gate on routes costs a measured step
    route_noise) bench route_noise --train-seconds 60 ;; # bf16 and FP8 engines; see ADR 18
    demo) demo cluster.num_gpus=1 cluster.placement=colocated ;;
    demo_apart) demo cluster.num_gpus=2 cluster.placement=disaggregated ;;
    demo_tp2) demo cluster.num_gpus=2 cluster.placement=colocated policy.parallel.tp=2 \
      policy.parallel.ep=2 rollout.tensor_parallel=2 ;;
    asynchronous) bench asynchronous rollout.enforce_eager=true rollout.gpu_memory_utilization=0.3 ;;
    verify) "$PYTHON" -m rltrain.cli.app verify ;;
    verify_bf16) "$PYTHON" -m rltrain.cli.app verify --bf16 ;;
    *) echo "no part called $part"; return 2 ;;
  esac
}
export -f run bench demo
export OUT PYTHON models

# Not fp8_sync: fp8_rollout contains it.
one="head sync route_scheduler stop_scheduler fp8_rollout fp8_first_step proof_ipc train rollout"
one="$one routes step weight_sync_ipc mismatch route_gate route_noise demo"
two="proof_broadcast weight_sync_broadcast overlap demo_apart demo_tp2 verify verify_bf16 asynchronous"
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
[ "$gpus" -ge 2 ] && one="$one $two"
failed=0
for asked in ${*:-$one}; do
  part=${asked%%:*} limit=${asked#*:} started=$SECONDS
  [ "$limit" = "$asked" ] && limit=900
  part=$part timeout "$limit" bash -c run > "$OUT/$part.log" 2>&1
  status=$?
  echo "$(date +%T) $part: exit status $status after $((SECONDS - started)) s"
  [ $status -eq 0 ] || failed=1
done
exit $failed
