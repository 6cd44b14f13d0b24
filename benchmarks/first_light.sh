#!/usr/bin/env bash
# The first minutes on a GPU: what is worth most first, each stage with its own limit, none stops another. Where the
# first kernel fails the causes are collected, and the script ends.
#
#     OUT=out bash benchmarks/first_light.sh [--minutes 9] [--stages "facts first smoke ..."] [--wheels .whl] [--cpu]
#
# Stages: facts first smoke norms linear step more block fused kernels transforms tune. What has passed on this machine
# is kept in $STATE (a folder for temporary files) and skipped by the next call. $OUT gets small files. The stage
# fused runs kernels that `first_light.py bundle --bundle .whl/fused.json` has compiled elsewhere by a newer Triton.
# NORMS, PEERS: the workloads and peers of the stage norms, for at most NORMS_SECONDS.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd); cd "$root" || exit 2
python=${PYTHON:-python3} minutes=9 wheels='' cpu='' stages='facts first smoke norms linear step more block fused kernels transforms'
while (($#)); do case $1 in
    --cpu) cpu=1; shift ;;
    --minutes) minutes=$2; shift 2 ;;
    --stages) stages=$2; shift 2 ;;
    --wheels) wheels=$2; shift 2 ;;
    *) echo "first_light.sh: unknown '$1'" >&2; exit 2 ;;
esac; done
deadline=$(($(date +%s) + 60 * minutes))
temporary=$(dirname "$(mktemp -u)"); OUT=${OUT:-$temporary/first_light_out}; state=${STATE:-$temporary/first_light}
mkdir -p "$OUT" "$state" || exit 2
log=$OUT/log.txt
exec > >(tee -a "$log") 2>&1
began=$(date +%s)
export JLN_COMMIT=${JLN_COMMIT:-$(git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XLA_PYTHON_CLIENT_PREALLOCATE=false JLN_CACHE_DIR=${JLN_CACHE_DIR:-$state/cache}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-1} PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [[ -n $wheels ]]; then
    [[ -d $state/site ]] || "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$state/site" "$wheels"/*.whl || exit 2
    export PYTHONPATH=$root:$state/site:${PYTHONPATH#"$root"}
fi
if [[ -n $cpu ]]; then
    export JAX_PLATFORMS=cpu TRITON_INTERPRET=1 FIRST_LIGHT_CPU=1
else
    export JAX_PLATFORMS=cuda,cpu TRITON_INTERPRET=0
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
worst=0
stage() { # stage NAME LIMIT COMMAND...
    local name=$1 limit=$2 start=$SECONDS status; shift 2
    [[ " $stages " == *" $name "* ]] || return 0
    [[ ! -e $state/$name.passed ]] || { echo "== $name passed before"; return 0; }
    local seconds=$(($(left) - 8)); ((seconds > limit)) && seconds=$limit
    ((seconds >= 15)) || { echo "== $name NOT BEGUN: no time"; worst=$((worst ? worst : 3)); return 3; }
    echo "== $name, at $(($(date +%s) - began)) s, for at most $seconds s"
    export STAGE_SECONDS=$seconds
    timeout --kill-after=5 "$seconds" bash -c '"$@"' "$name" "$@"; status=$?
    echo "== $name ended with $status after $((SECONDS - start)) s"
    ((status == 0)) && touch "$state/$name.passed"
    ((status == 0 || worst == 1)) || { ((status == 3 || status == 124 || status == 137)) && worst=3 || worst=1; }
    collect
    return $status
}
collect() { # small files alone
    for f in facts.json smoke.jsonl small_step.json fused.json tuning.json; do [[ -e $state/$f ]] && cp "$state/$f" "$OUT/"; done
    [[ -e $state/bench/results.json ]] && cp "$state/bench/results.json" "$OUT/bench.json"
    ls "$state"/tests-*.xml >/dev/null 2>&1 && tar -C "$state" -czf "$OUT/tests.tgz" $(cd "$state" && ls tests-*.xml tests-*.log 2>/dev/null)
    [[ -d $state/diagnosis ]] && tar -C "$state" -czf "$OUT/tests.tgz" diagnosis # never both: it ends there
    return 0
}
bench() { # PEERS WORKLOAD...: into one file; begins none in the last 25 seconds
    local peers=$1 more=(); shift; [[ -n $cpu ]] && more=(--repetitions 3)
    "$python" -m jln bench "$@" --peers "$peers" --even-wrong --resume --output "$state/bench" --seconds $((STAGE_SECONDS - 25)) "${more[@]}"
}
tests() { # NAME FILE...
    local name=$1 n=$(nproc) flags='--xla_gpu_autotune_level=0'; shift
    [[ -n $cpu ]] && n=1 flags=''
    XLA_FLAGS="${XLA_FLAGS:-} $flags" JLN_EXAMPLES=10 "$python" -m pytest -v -rfE -p no:cacheprovider -W default --continue-on-collection-errors \
        --junitxml="$state/tests-$name.xml" --tb=short -n $((n > 14 ? 14 : n)) --dist worksteal "$@" >"$state/tests-$name.log" 2>&1
    local status=$?; tail -n 30 "$state/tests-$name.log"; return $status
}
export -f bench tests; export python state cpu
# The junit file is written at the end alone: a run that is cut off is interrupted first, and then writes what it has.
soft() { timeout --signal=INT --kill-after=12 $((STAGE_SECONDS - 15)) bash -c '"$@"' stage "$@"; }
export -f soft

norms=(${NORMS:-layer-norm-4096}) few=(llama-4096 add-layer-norm-4096) linears=(linear-4096-12288 linear-4096-256)
more=(layer-norm-1024 layer-norm-32768 norms-both-sides-4096 gated-4096 x-bias-4096 alphafold-pair-axis-0 decode-1)
kernels=(tests/operators/test_operators.py tests/operators/test_accuracy.py tests/operators/test_rounded_sum.py tests/operators/test_linear_accuracy.py)
transforms=(tests/transformations/test_transforms.py tests/operators/test_linears.py tests/operators/test_several_linears.py tests/transformations/test_frozen.py tests/transformations/test_matrix.py)
step=() peers=${PEERS:-jln,jnp,flax,torch}
if [[ -n $cpu ]]; then
    norms=(decode-1) few=(decode-4) linears=(decode-1-qkv) more=(decode-16) step=(--layers 2 --tokens 16 --width 64) peers=jln,jnp
    kernels=(tests/operators/test_operators.py -k reduction_of_many) transforms=(tests/operators/test_result_dtype.py -k bfloat16)
fi

stage facts 60 "${py[@]}" facts --out "$state/facts.json"
if ! stage first 60 "${py[@]}" first; then
    echo "== the first kernel failed: the causes are collected, and the call ends"
    timeout 100 "${py[@]}" diagnose --out "$state/diagnosis"; rm -rf "$state/diagnosis/hlo/"*.pb; collect; exit 1
fi
stage smoke 100 "${py[@]}" smoke --out "$state/smoke.jsonl" --seconds 85
stage norms "${NORMS_SECONDS:-90}" bench "$peers" "${norms[@]}"
stage linear 110 bench jln,jln-norm,jnp,flax "${few[@]}" "${linears[@]}"
stage step 60 "$python" benchmarks/small_step.py --output "$state" "${step[@]}"
stage kernels 150 soft tests kernels "${kernels[@]}"
stage more 110 bench jln,jnp,flax "${more[@]}"
[[ -n $cpu ]] || stage block 70 bench jln,jnp,flax block-1024
[[ ! -e .whl/fused.json ]] || stage fused 60 "${py[@]}" fused --bundle .whl/fused.json --out "$state/fused.json" --seconds 40
stage transforms 400 soft tests transforms "${transforms[@]}"
stage tune 500 "$python" -m jln tune ${TUNE:-layer-norm-4096} --output "$state/tuning.json" --seconds $(($(left) > 70 ? $(left) - 60 : 10))
collect
echo "== done at $(($(date +%s) - began)) s, status $worst"; ls -la "$OUT"
exit $worst
