#!/bin/bash
# Submit value pretraining, training and evaluation as three jobs, each of which starts after the previous one succeeds.
#   slurm/chain.sh RUN_DIR RECIPE.yaml [--account=A --partition=P --nodes=2 ... (options of sbatch)] [-- KEY=VALUE ...]
# Uses the environment variables of slurm/vapo.sbatch. Prints the job ids; if one job cannot be submitted, the others are cancelled.
set -euo pipefail

if [ $# -lt 2 ] || [ ! -f "$2" ]; then
    echo "error: usage: slurm/chain.sh RUN_DIR RECIPE.yaml [OPTIONS OF SBATCH] [-- KEY=VALUE ...]" >&2
    exit 2
fi
folder=${1%/} recipe=$2
shift 2
options=()
while [ $# -gt 0 ]; do
    if [ "$1" = -- ]; then
        shift
        break
    fi
    options+=("$1")
    shift
done
script=$(dirname "$0")/vapo.sbatch
critic=${folder}_value_pretraining/critic_pretrained/hf
jobs=()

submit() { # NAME ARGUMENT...
    local name=$1 after=()
    shift
    [ ${#jobs[@]} -eq 0 ] || after=(--dependency="afterok:${jobs[-1]}" --kill-on-invalid-dep=yes)
    local id
    id=$(sbatch --parsable --job-name="$name" "${after[@]}" "${options[@]}" "$script" "$@") || {
        [ ${#jobs[@]} -eq 0 ] || scancel "${jobs[@]}"
        echo "error: sbatch rejected job $name; all jobs of the chain are cancelled" >&2
        exit 2
    }
    jobs+=("${id%%;*}")
    echo "$name: job ${jobs[-1]}"
}

submit pretrain train "$recipe" "$@" run.dir="${folder}_value_pretraining" run.steps=0 eval.at_start=false
submit train train "$recipe" "$@" run.dir="$folder" critic.init=saved critic.path="$critic" critic.value_pretraining.steps=0
submit eval eval "$recipe" --checkpoint "$folder/export/hf" "$@" run.dir="$folder"
