#!/bin/sh
# One item of the queue that README.md explains:
#     OUT=FOLDER sh benchmarks/gpu/queue.sh kernels|attention|training|decoding|blocks|compiled|RECIPE
# Every program has a time limit, and what it measured so far is in $OUT when that is reached.
# TRY=1 does the same at tiny sizes on a processor, to see that the commands are right.
set -u
failed=0
cd "$(dirname "$0")/../.."
OUT=${OUT:-.} TRY=${TRY:-} python=${PYTHON:-python3} packages=/tmp/txl_packages
export PYTHONPATH="src:$packages${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export CUBLAS_WORKSPACE_CONFIG=:4096:8
if [ -d .wheels ] && [ ! -d $packages ]; then
    $python -m pip install -q --no-index --no-deps --no-compile --target $packages .wheels/*.whl
fi

run() {
    seconds=$1 && shift
    echo "== $*"
    timeout -s INT -k 10 "$seconds" "$@" && return
    echo "== ended with $?: $*"
    failed=1
}

# measure SECONDS PROGRAM NAME WORD...: the numbers go to $OUT/NAME.json
measure() {
    seconds=$1 program=$2 name=$3 && shift 3
    set -- "$@" --rounds "${ROUNDS:-4}" --json "$OUT/$name.json"
    if [ "$TRY" ]; then
        set -- "$@" --rounds 1 --shape tiny --device cpu --dtypes float32
        [ "$program" = attention ] && set -- "$@" --length 16 --mem_len 16 --batch 2
    else
        set -- "$@" --device cuda
    fi
    run "$seconds" "$python" "benchmarks/$program.py" "$@"
}

# train RECIPE TEXT WORD...: at most five minutes of steps, if the words do not say otherwise.
# One layer is compiled for all: that of ptb-word takes 22 seconds, the whole model 147.
train() {
    recipe=$1 text=$2 folder=/tmp/txl_runs/$1 && shift 2
    set -- --data.path "$text" --train.compile layers --train.minutes 5 "$@"
    [ "$TRY" ] && set -- "$@" --train.compile False --model.n_layer 1 --model.n_head 2 \
        --model.d_model 32 --model.d_head 16 --model.d_inner 32 --train.steps 8 \
        --train.warmup_steps 2 --train.log_every 2
    run 530 "$python" -m transformer_xl train "$recipe" --out "$folder" --json "$@"
    for file in results.json metrics.jsonl report.html; do
        cp "$folder/$file" "$OUT/$recipe-$file" || failed=1
    done
}

# ship RECIPE: the run is copied back without its weights for resuming; the model is shipped from it.
# Not compiled: compilation would distort the measured speed from which the last step is computed.
ship() {
    text=/tmp/txl_texts/$1 && mkdir -p "$text"
    for part in train valid test; do
        # Where the compressed text is missing, one that is there already is not emptied.
        packed=.data/$1/$part.txt.gz
        { [ -s "$packed" ] && gzip -dc "$packed" >"$text/$part.txt"; } || failed=1
    done
    train "$1" "$text/train.txt" --data.valid_path "$text/valid.txt" \
        --data.test_path "$text/test.txt" --train.compile False
    tar -C /tmp/txl_runs --exclude 'shard-*' -cf "$OUT/$1-run.tar" "$1" || failed=1
}

training="--dtypes bfloat16 --ways ours ours_skew gpt"
half="--dtypes bfloat16_weights"
case ${1:-} in
kernels)
    run 280 "$python" -m pytest -q -n 14 -m gpu -W default tests/ops tests/nn/test_decoder.py \
        tests/laws/test_kernels.py tests/train/test_waiting.py tests/train/test_muon.py
    # The allocator of PyTorch would hide from it where a tensor ends.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    command -v compute-sanitizer >/dev/null && run 180 compute-sanitizer --error-exitcode 9 \
        "$python" -m pytest -q -p no:xdist -m gpu -W default tests/ops/test_triton.py \
        -k "layout or all_streams"
    ;;
attention)
    measure 150 attention attention_512 --dtypes bfloat16 --length 512 --mem_len 512 --batch 22 \
        --ways triton skew reference sdpa_mask plain flex
    measure 90 attention attention_3800 --dtypes bfloat16 --length 128 --mem_len 3800 --batch 4 \
        --forward --ways triton skew sdpa_mask plain
    ;;
training)
    measure 60 training training_enwik8 --shape enwik8 $training
    measure 90 training training_base --shape nvidia-base $training
    measure 90 training training_large --shape nvidia-large $training
    measure 240 training training_enwik8_compiled --shape enwik8 --compile $training ours_layers
    ;;
compiled)
    # Compiled without the kernels, a model keeps its scores: two ways would not fit side by side.
    alone="--dtypes bfloat16 --ways ours --compile"
    measure 260 training training_base_compiled --shape nvidia-base $alone
    measure 300 training training_large_compiled --shape nvidia-large $alone
    ;;
decoding)
    measure 60 generation generation --shape enwik8 $half --mem_lens 640 \
        --ways ours ours_called gpt
    measure 60 generation generation_64 --shape enwik8 $half --mem_lens 2048 --batches 64 --ways ours
    measure 90 evaluation evaluation --shape enwik8 $half --lengths 64 --mem_lens 640 \
        --batches 1 32 --ways ours ours_skew gpt
    measure 90 evaluation evaluation_base --shape nvidia-base $half --lengths 64 --mem_lens 640 \
        --batches 1 32 --ways ours ours_skew
    ;;
blocks)
    run 90 "$python" benchmarks/gpu/tune_step.py --json "$OUT/step_blocks.json"
    run 330 "$python" benchmarks/gpu/tune.py --minutes 5 --json "$OUT/blocks.json"
    ;;
shakespeare-char) train shakespeare-char .data/tinyshakespeare/input.txt ;;
ptb-word)
    # What validations and the report take comes on top of the minutes.
    train "$1" .data/ptb --train.minutes 7 --train.eval_every 1000 --eval.mem_lens 70 140
    ;;
ptb-char) train "$1" .data/ptb ;;
wikitext-2) train wikitext-2 .data/wikitext-2 ;;
python-code | english) ship "$1" ;;
*)
    sed -n '2,3p' "$0" >&2
    exit 2
    ;;
esac
exit $failed
