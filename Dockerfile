# vapo-mcore for GPU clusters. Build in the repository: docker build --tag vapo-mcore:0.1.0 .
# For pyxis/enroot: enroot import --output vapo-mcore.sqsh dockerd://vapo-mcore:0.1.0
# The devel image, because Transformer Engine compiles its extension; CUDA 13.0, because torch's and vLLM's wheels are built with it (driver 580 or newer).
FROM nvidia/cuda:13.0.3-cudnn-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git ninja-build numactl python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/vapo-mcore
ENV PATH=$VIRTUAL_ENV/bin:$PATH
RUN python3 -m venv $VIRTUAL_ENV && pip install --no-cache-dir --upgrade pip==25.3 setuptools==78.1.1 wheel==0.45.1

WORKDIR /opt/src/vapo-mcore
# torch and vLLM first: they change less often than this package, and Transformer Engine is compiled against torch.
RUN pip install --no-cache-dir "torch==2.13.0" "vllm==0.32.0"
# The newest of the versions that Megatron-Core 0.16.1 names.
RUN NVTE_FRAMEWORK=pytorch MAX_JOBS=8 pip install --no-cache-dir --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.11.0"
COPY pyproject.toml README.md LICENSE ./
COPY requirements ./requirements
COPY vapo_mcore ./vapo_mcore
COPY examples ./examples
COPY slurm ./slurm
RUN pip install --no-cache-dir --no-build-isolation "megatron-core==0.16.1" ".[tracking]" \
    && pip install --no-cache-dir --no-deps --requirement requirements/launch.txt \
    && python -c "import torch, vllm, megatron.core, transformer_engine.pytorch, nemo_run; import vapo_mcore.cli"

# Clusters run containers as the submitting user; nothing here needs root, and HOME may be read-only there.
RUN useradd --create-home --uid 10001 vapo
USER vapo
ENV HF_HUB_OFFLINE=1 TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor VLLM_CACHE_ROOT=/tmp/vllm \
    FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer
WORKDIR /home/vapo
ENTRYPOINT []
CMD ["vapo-mcore", "--help"]
