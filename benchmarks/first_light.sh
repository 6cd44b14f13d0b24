#!/usr/bin/env bash
# The first minutes on a GPU: what is worth most first, each stage with its own limit, none stops another. Where no kernel
# can run the script says why and ends; where the first one fails the causes are collected, and it ends.
#
#     OUT=out bash benchmarks/first_light.sh [--minutes 9] [--stages "facts first ..."] [--wheels .whl] [--cpu]
#
# Stages: facts first check norms linear step kernels more peers fused tiles rest transforms. What has passed is kept in
# $STATE (a folder for temporary files): the next call on the machine skips it, and goes on with what was cut off. $OUT
# gets at most eight small files, of which `python benchmarks/card.py page $OUT` makes a page.
# --wheels: a folder of wheels to install beside what there is, without a network. In it may lie fused.json, kernels that
# `first_light.py bundle` has compiled elsewhere by a newer Triton, and candidates, tiles of `candidates.py compile`.
# --cpu: a rehearsal without a GPU, of small sizes in Triton's interpreter.
# NORMS, PEERS: the workloads and peers of the stage norms, for at most NORMS_SECONDS.
# Exit status: 0 all passed, 1 something is wrong, 2 a bad request, 3 out of time.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root" || exit 2
python=${PYTHON:-python3} minutes=9 wheels='' cpu=''
stages='facts first check norms linear step kernels more peers fused tiles rest transforms'
usage() { echo "first_light.sh: $1" >&2; exit 2; }
while (($#)); do case $1 in
    --cpu) cpu=1; shift ;;
    --minutes | --stages | --wheels) (($# > 1)) || usage "$1 needs a value"; printf -v "${1#--}" %s "$2"; shift 2 ;;
    *) usage "unknown option '$1'; known are --minutes, --stages, --wheels, --cpu" ;;
esac; done
[[ $minutes =~ ^[0-9]+$ && $((10#$minutes)) -gt 0 ]] || usage "--minutes is a positive whole number, not '$minutes'"
for name in $stages; do
    [[ " facts first check norms linear step kernels more peers fused tiles rest transforms " == *" $name "* ]] || usage "there is no stage '$name'"
done
[[ -z $wheels || -d $wheels ]] || usage "there is no folder '$wheels'"
platform=cuda
[[ ! -e /dev/kfd ]] || platform=rocm
[[ -n $cpu || -e /dev/kfd || -n $(compgen -G '/dev/nvidia[0-9]*') ]] || usage "there is no NVIDIA or AMD GPU here; --cpu rehearses without one"

began=$(date +%s) deadline=$(($(date +%s) + 60 * 10#$minutes))
temporary=$(dirname "$(mktemp -u)"); OUT=${OUT:-$temporary/first_light_out}; state=${STATE:-$temporary/first_light}
mkdir -p "$OUT" "$state" || exit 2
exec > >(tee -a "$OUT/log.txt") 2>&1
log=$!; trap 'exec >&- 2>&-; wait $log' EXIT # until it has the last line
export JLN_COMMIT=${JLN_COMMIT:-$(git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XLA_PYTHON_CLIENT_PREALLOCATE=false JLN_CACHE_DIR=${JLN_CACHE_DIR:-$state/cache}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-1} PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [[ -n $wheels && -n $(compgen -G "$wheels/*.whl") ]]; then
    ls "$wheels"/*.whl | cmp -s - "$state/wheels.txt" || {
        rm -rf "$state/site"
        "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$state/site" "$wheels"/*.whl || exit 2
        ls "$wheels"/*.whl >"$state/wheels.txt"
    }
    export PYTHONPATH=$root:$state/site:${PYTHONPATH#"$root"}
fi
if [[ -n $cpu ]]; then
    export JAX_PLATFORMS=cpu TRITON_INTERPRET=1 FIRST_LIGHT_CPU=1
else # or tests that see no GPU would run the interpreter, and pass
    export JAX_PLATFORMS=$platform,cpu TRITON_INTERPRET=0
fi
if [[ -z $cpu && $platform == cuda ]]; then
    # jaxlib's launcher of Triton's kernels needs a ptxas (it is built without libnvptxcompiler), and XLA libdevice: from
    # the machine's CUDA, else from Triton's package.
    nv=$("$python" -c "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('triton').origin).parent / 'backends/nvidia')")
    [[ -x /usr/local/cuda/bin/ptxas ]] && export PATH=/usr/local/cuda/bin:$PATH
    command -v ptxas >/dev/null || export PATH=$PATH:$nv/bin
    if [[ -z $(compgen -G '/usr/local/cuda*/nvvm/libdevice/libdevice.*.bc') ]]; then
        cu13=$("$python" -c "import nvidia.cu13 as n; print(list(n.__path__)[0])" 2>/dev/null)
        for d in "$cu13" "$state"; do [[ -n $d ]] && mkdir -p "$d/nvvm/libdevice" && cp -n "$nv/lib/libdevice.10.bc" "$d/nvvm/libdevice/"; done
    fi
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.limit --format=csv || true
    echo "ptxas: $(command -v ptxas) $(ptxas --version 2>/dev/null | tail -1); devices: $(ls /dev/nvidia* 2>/dev/null | tr '\n' ' ')"
fi

py=("$python" benchmarks/first_light.py)
left() { echo $((deadline - $(date +%s))); }
declare -A ended
stage() { # stage NAME LEAST LIMIT COMMAND...: in at most LIMIT seconds, and not in fewer than LEAST
    local name=$1 least=$2 limit=$3 start=$SECONDS status; shift 3
    [[ " $stages " == *" $name "* ]] || return 0
    [[ ! -e $state/$name.passed ]] || { echo "== $name passed before"; return 0; }
    local seconds=$(($(left) - 8)); ((seconds > limit)) && seconds=$limit
    ((seconds >= least)) || { echo "== $name NOT BEGUN: no time"; ended[$name]=3; return 3; }
    echo "== $name, at $(($(date +%s) - began)) s, for at most $seconds s"
    export STAGE_SECONDS=$seconds
    timeout --kill-after=5 "$seconds" bash -c '"$@"' "$name" "$@"; status=$?
    echo "== $name ended with $status after $((SECONDS - start)) s"
    ended[$name]=$status
    ((status == 0)) && touch "$state/$name.passed"
    collect
    return $status
}
collect() { # small files alone
    for f in facts.json check.jsonl small_step.json fused.json tiles.json; do [[ -e $state/$f ]] && cp "$state/$f" "$OUT/"; done
    [[ -e $state/bench/results.json ]] && cp "$state/bench/results.json" "$OUT/bench.json"
    local logs; logs=$(cd "$state" && ls -d tests-*.xml tests-*.log diagnosis 2>/dev/null)
    [[ -z $logs ]] || tar -C "$state" -czf "$OUT/tests.tgz" $logs
}
flags() { # XLA's flags for programs that are not timed
    echo "${XLA_FLAGS:-} $([[ -n $cpu ]] || echo --xla_gpu_autotune_level=0)"
}
check() { # every form beside float64, by processes; a later call goes on with what is left
    XLA_FLAGS=$(flags) "$python" benchmarks/check_card.py "$state/check.jsonl" ${cpu:+--dtype bfloat16} --seconds $((STAGE_SECONDS - 12))
}
bench() { # PEERS WORKLOAD...: into one file; begins none in the last 25 seconds
    local peers=$1; shift
    "$python" benchmarks/bench.py "$@" --peers "$peers" --output "$state/bench" --seconds $((STAGE_SECONDS - 25)) ${cpu:+--repetitions 3}
}
tests() { # NAME FILE...: what passed in an earlier call is left out
    local name=$1 n=$(nproc) status; shift
    local to=$state/tests-$name-$(date +%s) passed=$state/tests-$name.passed
    [[ -z $cpu ]] || n=1
    # The junit file is written at the end alone, so what is cut off is interrupted first.
    PASSED=$passed PYTHONPATH=$PYTHONPATH:$root/benchmarks XLA_FLAGS=$(flags) timeout --foreground --signal=INT --kill-after=12 $((STAGE_SECONDS - 15)) \
        "$python" -m pytest -v -rfE -p passed -p no:cacheprovider -W default --continue-on-collection-errors --junitxml="$to.xml" --tb=short -n $((n > 14 ? 14 : n)) --dist worksteal "$@" >"$to.log" 2>&1
    status=$?; tail -n 30 "$to.log"
    sed -n 's/^.* PASSED \(.*::.*[^ ]\) *$/\1/p' "$to.log" >>"$passed"
    return $((status == 5 ? 0 : status)) # 5: nothing was left
}
export -f flags check bench tests; export root python state cpu

norms=(${NORMS:-layer-norm-4096}) few=(llama-4096 add-layer-norm-4096) linears=(linear-4096-12288 linear-4096-256)
more=(layer-norm-1024 layer-norm-32768 norms-both-sides-4096 gated-4096 x-bias-4096 decode-1)
kernels=(tests/operators/test_operators.py tests/operators/test_accuracy.py tests/operators/test_rounded_sum.py tests/operators/test_linear_accuracy.py)
transforms=(tests/transformations/test_transforms.py tests/operators/test_several_linears.py tests/transformations/test_frozen.py tests/transformations/test_matrix.py)
step=() peers=${PEERS:-jln,jnp,cudnn,flax,torch}
if [[ -n $cpu ]]; then
    norms=(decode-1) few=(decode-4) linears=(decode-1-qkv) more=(decode-16) step=(--layers 2 --tokens 16 --width 64) peers=jln,jnp
    kernels=(tests/operators/test_operators.py -k reduction_of_many) transforms=(tests/operators/test_result_dtype.py -k bfloat16)
fi

stage facts 15 60 "${py[@]}" facts --out "$state/facts.json"
[[ $? -ne 1 ]] || exit 1 # it said why no kernel can run
if ! stage first 15 60 "${py[@]}" first; then
    [[ ${ended[first]} -ne 3 ]] || exit 3
    echo "== the first kernel failed: the causes are collected, and the call ends"
    timeout 100 "${py[@]}" diagnose --out "$state/diagnosis"; rm -rf "$state/diagnosis/hlo/"*.pb; collect; exit 1
fi
stage check 30 100 check
stage norms 45 "${NORMS_SECONDS:-90}" bench "$peers" "${norms[@]}"
stage linear 45 110 bench jln,jln-norm,jnp,flax "${few[@]}" "${linears[@]}"
stage step 20 60 "$python" benchmarks/small_step.py --output "$state" "${step[@]}"
stage kernels 60 150 tests kernels "${kernels[@]}"
stage more 45 110 bench jln,jnp,flax "${more[@]}"
if [[ -z $cpu ]]; then
    stage peers 60 150 bench jln,jnp,cudnn,flax,haiku,tokamax,torch,torch.compile,liger "${norms[@]}" llama-4096
    [[ ! -e ${wheels:-.}/fused.json ]] || stage fused 25 60 "${py[@]}" fused --bundle "$wheels/fused.json" --out "$state/fused.json" --seconds 40
    [[ ! -e ${wheels:-.}/candidates ]] || stage tiles 25 90 "$python" benchmarks/candidates.py time "$wheels/candidates" --output "$state/tiles.json" --seconds 60
fi
[[ -e $state/check.passed ]] || { stage rest 30 200 check && [[ -e $state/rest.passed ]] && touch "$state/check.passed"; }
stage transforms 60 400 tests transforms "${transforms[@]}"
collect
worst=0
for name in "${!ended[@]}"; do
    [[ ! -e $state/$name.passed ]] || continue
    case ${ended[$name]} in 3 | 124 | 137) worst=$((worst ? worst : 3)) ;; *) worst=1 ;; esac
done
echo "== done at $(($(date +%s) - began)) s, status $worst"; ls -la "$OUT"
exit $worst
