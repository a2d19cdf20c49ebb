# The CPU's decoder, compiled where there is a compiler: the image itself needs none.
FROM python:3.11 AS decoder
COPY engine/native /native
RUN if [ "$(uname -m)" = x86_64 ]; then python /native/compile.py; fi

# One image for every part: `engine`, `gateway` and `migrate` are commands of it (see compose.yaml).
FROM python:3.11-slim

# Which build of PyTorch: left empty, pip's ordinary one, which on x86-64 runs on CPUs and NVIDIA GPUs and is large. For
# a smaller CPU build or another CUDA version, give the address of PyTorch's own index for it: --build-arg TORCH_INDEX=…
ARG TORCH_INDEX=

RUN useradd --create-home --uid 10001 farthing \
    && mkdir -p /var/lib/farthing /var/cache/farthing/models \
    && chown -R farthing:farthing /var/lib/farthing /var/cache/farthing
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    FARTHING_MODELS=/var/cache/farthing/models XDG_CACHE_HOME=/var/cache FARTHING_DATA_DIR=/var/lib/farthing
WORKDIR /opt/farthing

# Dependencies first, PyTorch before the rest: a change of our code reuses both layers.
COPY pyproject.toml ./
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    p = project["dependencies"] + project["optional-dependencies"]["parquet"]; \
    torch = [d for d in p if d.startswith("torch")]; open("torch.txt", "w").write("\n".join(torch)); \
    open("rest.txt", "w").write("\n".join(d for d in p if d not in torch))' \
    && pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r torch.txt
RUN pip install -r rest.txt

COPY . .
RUN pip install --no-deps .
COPY --from=decoder /native/ /usr/local/lib/python3.11/site-packages/engine/native/

USER farthing
WORKDIR /var/lib/farthing
ENTRYPOINT ["farthing"]
CMD ["--help"]
