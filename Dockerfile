# One image for every part: `engine`, `gateway` and `migrate` are commands of it (see compose.yaml).
FROM python:3.11-slim

# CPU builds of PyTorch by default. For NVIDIA: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

RUN useradd --create-home --uid 10001 farthing \
    && mkdir -p /var/lib/farthing /var/cache/farthing/models \
    && chown -R farthing:farthing /var/lib/farthing /var/cache/farthing
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    FARTHING_MODELS=/var/cache/farthing/models FARTHING_DATA_DIR=/var/lib/farthing
WORKDIR /opt/farthing

# Dependencies first, PyTorch before the rest: a change of our code reuses both layers.
COPY pyproject.toml ./
RUN python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]; \
    torch = [d for d in p if d.startswith("torch")]; open("torch.txt", "w").write("\n".join(torch)); \
    open("rest.txt", "w").write("\n".join(d for d in p if d not in torch))' \
    && pip install --extra-index-url "$TORCH_INDEX" --index-url "$TORCH_INDEX" -r torch.txt
RUN pip install -r rest.txt

COPY . .
RUN pip install --no-deps .

USER farthing
WORKDIR /var/lib/farthing
ENTRYPOINT ["farthing"]
CMD ["--help"]
