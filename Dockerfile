# The README's two commands in a container: `docker build -t composer_nb .`, then `docker run --rm composer_nb make test`.
FROM python:3.11-slim-bookworm

RUN apt-get update -q \
    && apt-get install -q -y --no-install-recommends git make chromium chromium-driver slurm-wlm munge \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /book
COPY . .
# For example --build-arg TORCH_INDEX="--index-url …" for CPU builds of torch.
ARG TORCH_INDEX=
ENV TORCH_INDEX=${TORCH_INDEX}
RUN make quickstart

CMD ["make", "test"]
