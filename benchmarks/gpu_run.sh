#!/usr/bin/env bash
# Everything that a GPU is needed for, in one command of under nine minutes: the tests through the compiled kernels,
# `python -m jln check`, `python -m jln bench`, a small model's step. Needs nothing but this checkout and a Python with
# JAX for CUDA or ROCm. On ROCm `check`, `bench` and the step ask for the kernels by name, as None is XLA there.
#
#     benchmarks/gpu_run.sh [--run NAME] [--results FOLDER] [--wheels FOLDER] [--minutes N] [--tune] [--cpu]
#
# Each stage leaves FOLDER/NAME/STAGE.log and, once it has passed, STAGE.json, which the next call skips: a call that
# runs out of time is taken up again by the same command. --wheels: a folder of wheels to install beside what there is
# (jax-triton, for one), without a network. --tune: last, search for faster tiles, into FOLDER/NAME/tuning.json, for
# which more minutes are well spent; JLN_TUNING=that file and another --run then test and measure with them. --cpu: a
# rehearsal of the script itself in some two minutes, no GPU needed.
# Exit status: 0 all passed, 1 something is wrong, 2 a bad request, 3 out of time.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
run='' results="$root/benchmarks/results" wheels='' minutes=9 tune='' rehearsal=''

usage() { echo "gpu_run.sh: $1" >&2; exit 2; }
while (($#)); do
    case $1 in
        --cpu) rehearsal=1; shift; continue ;;
        --tune) tune=1; shift; continue ;;
        --run | --results | --wheels | --minutes) (($# > 1)) || usage "$1 needs a value" ;;
        *) usage "unknown option '$1'; known are --run, --results, --wheels, --minutes, --tune, --cpu" ;;
    esac
    printf -v "${1#--}" %s "$2"
    shift 2
done
[[ $minutes =~ ^[0-9]+$ && $minutes -gt 0 ]] || usage "--minutes is a positive whole number, not '$minutes'"
[[ -z $wheels || -n $(compgen -G "$wheels/*.whl") ]] || usage "there are no wheels in '$wheels'"
platform=''
[[ ! -e /dev/nvidia0 ]] || platform=cuda
[[ -n $platform || ! -e /dev/kfd ]] || platform=rocm
[[ -n $rehearsal || -n $platform ]] || usage "there is no NVIDIA or AMD GPU here; --cpu rehearses without one"
command -v "$python" >/dev/null || usage "there is no '$python'; set PYTHON"

deadline=$(($(date +%s) + 60 * minutes))
export JLN_COMMIT=${JLN_COMMIT:-$(git -C "$root" describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)}
: "${run:=${rehearsal:+cpu-}$JLN_COMMIT}"
folder=$results/$run
mkdir -p "$folder" || usage "cannot write to '$folder'"
folder=$(cd "$folder" && pwd) # what is relative is so to where the caller is, as JLN_TUNING's file
[[ ${JLN_TUNING:-} != [!/~]* ]] || export JLN_TUNING=$PWD/$JLN_TUNING

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH=$root:$scratch${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # several processes share the card
if [[ -n $rehearsal ]]; then
    export JAX_PLATFORMS=cpu TRITON_INTERPRET=1
else # or tests that see no GPU would run the interpreter, and pass
    export JAX_PLATFORMS=$platform,cpu TRITON_INTERPRET=0
fi
if [[ -n $wheels ]]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$scratch" "$wheels"/*.whl || exit 2
fi
cd "$root" || exit 2

worst=0
stage() { # stage NAME COMMAND...: run it in the time that is left, unless it has passed before
    local name=$1 left=$((deadline - $(date +%s))) began=$SECONDS status
    shift
    if [[ -e $folder/$name.json ]]; then
        printf '%-12s passed before\n' "$name"
        return
    fi
    if ((left < 20)); then
        status=124
    else
        timeout --kill-after=10 "$left" bash -c '"$@"' "$name" "$@" >"$folder/$name.log" 2>&1
        status=$?
    fi
    case $status in
        0)
            printf '{"stage": "%s", "seconds": %d, "commit": "%s", "finished": "%s"}\n' \
                "$name" $((SECONDS - began)) "$JLN_COMMIT" "$(date -u +%FT%TZ)" >"$folder/$name.json"
            printf '%-12s passed in %d s\n' "$name" $((SECONDS - began))
            ;;
        3 | 124 | 137)
            printf '%-12s OUT OF TIME after %d s: call again\n' "$name" $((SECONDS - began))
            ((worst == 1)) || worst=3
            ;;
        *)
            printf '%-12s FAILED with %d after %d s; %s ends:\n' "$name" $status $((SECONDS - began)) "$folder/$name.log"
            tail -n 25 "$folder/$name.log"
            worst=1
            ;;
    esac
    return $status
}

environment() {
    { command -v nvidia-smi >/dev/null && nvidia-smi; } || { command -v rocm-smi >/dev/null && rocm-smi; } || true
    "$python" -m jln doctor --json # its verdict is also on what a GPU has no need of; what matters follows
    "$python" - <<'PYTHON'
import sys, jax, pytest, typer, xdist  # what the stages need, said here if it is missing
from jln._triton import target
platform = jax.devices()[0].platform
why = target.missing() if platform == "gpu" else None
print(platform, why)
sys.exit(why is not None or platform != ("cpu" if jax.config.jax_platforms == "cpu" else "gpu"))
PYTHON
}

tests() { # FILE...: by as many processes as compile kernels side by side. Deprecations of other versions are no findings.
    JLN_EXAMPLES=30 "$python" -m pytest -q -rf -p no:cacheprovider -W default -n "$workers" "$@"
}

until_the_end() { # seconds in which something may still be begun
    local left=$((deadline - $(date +%s) - 40))
    echo $((left > 0 ? left : 0))
}

bench() { # as many workloads as there is time for
    "$python" -m jln bench --resume --output "$folder" --seconds "$(until_the_end)" "$@"
}

small_step() { # where launches are what counts
    "$python" benchmarks/small_step.py --output "$folder" "$@"
}

tune() { # likewise
    "$python" -m jln tune "$@" --output "$folder/tuning.json" --seconds "$(until_the_end)"
}

export -f environment tests until_the_end bench small_step tune # for the shell that timeout can end
export python folder deadline
cores=$(nproc)
export workers=$((cores < 12 ? cores : 12))

# Left out: what is about the CPU, the interpreter, the compiler, or the command line's words.
kernels=(tests/operators/test_operators.py tests/operators/test_accuracy.py tests/operators/test_linear_accuracy.py tests/operators/test_rounded_sum.py)
transforms=(tests/transformations/test_transforms.py tests/transformations/test_matrix.py tests/operators/test_linears.py tests/operators/test_several_linears.py tests/transformations/test_frozen.py
    tests/transformations/test_checkpoint_policies.py tests/operators/test_abuse.py tests/operators/test_properties.py tests/operators/test_result_dtype.py tests/modules)
check=(check --device gpu)
benched=() small=() tuned=()
if [[ -n $rehearsal ]]; then
    workers=1
    kernels=(tests/operators/test_operators.py -k reduction_of_many) transforms=(tests/operators/test_result_dtype.py -k bfloat16)
    check=(check layer_norm --shape 8x64)
    benched=(decode-1 --peers jln,jnp,torch --repetitions 3)
    small=(--layers 2 --tokens 16 --width 64)
    tuned=(decode-1 --dry-run)
fi

stage environment environment || exit $worst # nothing else would be about this GPU
stage kernels tests "${kernels[@]}"
stage check "$python" -m jln "${check[@]}"
stage step small_step "${small[@]}"
stage bench bench "${benched[@]}"
stage transforms tests "${transforms[@]}"
[[ -z $tune ]] || stage tune tune "${tuned[@]}"
exit $worst
